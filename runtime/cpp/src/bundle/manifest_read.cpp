// pass_config.json -> Manifest, field by field in the order of pass_runtime/bundle/manifest.py. What is missing,
// unknown, or of another type or range is refused with its place in the document. Fields that this runtime does not
// read are checked all the same, so that both runtimes take the same bundles.

#include <algorithm>
#include <nlohmann/json.hpp>

#include "bundle/manifest.h"
#include "bundle/noise.h"
#include "errors.h"
#include "utf8.h"

namespace pass {

namespace {

using Json = nlohmann::ordered_json;

constexpr int max_nesting = 200;                            // nested lists and objects, as in Python
constexpr std::int64_t max_number = std::int64_t{1} << 53;  // so that sums of numbers cannot overflow

// A value and its place in the document, such as `model.vocab_size`.
struct At {
    const Json& value;
    std::string place;

    At operator()(const std::string& key, const Json& inner) const {
        return {inner, place.empty() ? key : place + "." + key};
    }
    void require(bool holds, const std::string& what) const {
        if (!holds) throw Error((place.empty() ? "file" : one_line(place)) + ": " + what);
    }
};

void read(const At& at, std::string& out) {
    at.require(at.value.is_string(), "must be a string");
    out = at.value.get<std::string>();
}

void read(const At& at, bool& out) {
    at.require(at.value.is_boolean(), "must be true or false");
    out = at.value.get<bool>();
}

void read(const At& at, std::int64_t& out) {
    const bool small = at.value.is_number_unsigned()
                           ? at.value.get<std::uint64_t>() <= max_number
                           : at.value.is_number_integer() && at.value.get<std::int64_t>() >= -max_number;
    at.require(small, "must be a whole number of at most 2^53");
    out = at.value.get<std::int64_t>();
}

// A share, from 0 to 1.
void read(const At& at, double& out) {
    at.require(at.value.is_number(), "must be a number");
    out = at.value.get<double>();
    at.require(out >= 0 && out <= 1, "must be 0 to 1");
}

void read(const At& at, Dimension& out) {
    if (at.value.is_string()) {
        out = at.value.get<std::string>();
    } else {
        read(at, out.emplace<std::int64_t>());
    }
}

template <class T>
void read(const At& at, std::optional<T>& out) {
    if (!at.value.is_null()) read(at, out.emplace());
}

template <class T>
void read(const At& at, std::vector<T>& out) {
    at.require(at.value.is_array(), "must be a list");
    for (const Json& item : at.value) {
        const At place = at(std::to_string(out.size()), item);
        read(place, out.emplace_back());
    }
}

template <class T>
void read(const At& at, Ordered<T>& out) {
    at.require(at.value.is_object(), "must be an object");
    for (const auto& [key, item] : at.value.items()) {
        auto& [name, value] = out.emplace_back(key, T());
        read(at(name, item), value);
    }
}

// Rules that a value has to keep besides its type.
struct Any {
    template <class T>
    void operator()(const At&, const T&) const {}
};

auto range(std::int64_t least, std::int64_t most = max_number) {
    return [=](const At& at, std::int64_t number) {
        at.require(number >= least && number <= most,
                   "must be " + (most == max_number ? "at least " + std::to_string(least)
                                                    : std::to_string(least) + " to " + std::to_string(most)));
    };
}
const auto positive = range(1), natural = range(0), lookahead = range(1, max_lookahead);

void capacity(const At& at, std::int64_t number) {
    at.require(number >= 4 && number % 4 == 0, "must be a positive multiple of 4");
}

void file_name(const At& at, const std::string& name) {
    at.require(is_file_name(name), "is not a plain file name, so it could point outside the bundle");
}

void sha256_text(const At& at, const std::string& text) {
    at.require(text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos,
               "must be a SHA-256");
}

template <class... Words>
auto one_of(Words... words) {
    return [=](const At& at, const std::string& text) {
        at.require(((text == words) || ...), ("must be one of" + ... + (std::string(" ") + words)));
    };
}

// A rule for every key of a mapping.
template <class Rule>
auto keys(Rule rule) {
    return [=](const At& at, const auto& mapping) {
        for (const auto& [name, value] : mapping) rule(at(name, at.value), name);
    };
}

// Takes the fields of an object one by one; `end` refuses the others.
class Fields {
   public:
    explicit Fields(const At& at) : at_(at) { at.require(at.value.is_object(), "must be an object"); }

    template <class T, class Rule = Any>
    Fields& field(const char* name, T& out, const Rule& rule = {}) {
        at_(name, at_.value).require(at_.value.contains(name), "is missing");
        return field_or_default(name, out, rule);
    }
    // A field that may be missing; `out` then stays as it is.
    template <class T, class Rule = Any>
    Fields& field_or_default(const char* name, T& out, const Rule& rule = {}) {
        known_.emplace_back(name);
        const auto found = at_.value.find(name);
        if (found == at_.value.end()) return *this;
        const At at = at_(name, *found);
        read(at, out);
        rule(at, out);
        return *this;
    }
    // A field that is checked and not kept.
    template <class T, class Rule = Any>
    Fields& unused(const char* name, const Rule& rule = {}) {
        T dropped{};
        return field(name, dropped, rule);
    }
    void end() const {
        for (const auto& [key, value] : at_.value.items()) {
            if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
            throw Error("unknown key '" + one_line(at_(key, value).place) +
                        "' (made by a newer pass-export? upgrade, or export again)");
        }
    }

   private:
    const At& at_;
    std::vector<std::string> known_;
};

void read(const At& at, Tensor& out) {
    Fields(at)
        .field("name", out.name)
        .field("dtype", out.dtype, one_of("int64", "int32", "bool", "float16", "bfloat16", "float32"))
        .field("shape", out.shape)
        .end();
}

void read(const At& at, Graph& out) {
    Fields(at).field("file", out.file).field("inputs", out.inputs).field("outputs", out.outputs).end();
}

void read(const At& at, DerivedTrunk& out) {
    const auto one = [](const At& of, const std::optional<std::int64_t>& size) {
        of.require(size.value_or(1) == 1, "must be 1 or null");
    };
    Fields(at)
        .field("file", out.file, file_name)
        .field("device", out.device, one_of("cpu", "cuda"))
        .field_or_default("batch", out.batch, one)
        .field_or_default("lookahead_rows", out.lookahead_rows)
        .end();
}

struct Scheme {};

void read(const At& at, Scheme&) {
    bool offsets = false;
    const auto block = [](const At& of, const std::optional<std::int64_t>& size) { positive(of, size.value_or(1)); };
    Fields(at)
        .unused<std::string>("numbers", one_of("int8", "int4", "fp8"))
        .unused<std::optional<std::int64_t>>("block_size", block)
        .unused<bool>("zero_points")
        .field_or_default("offsets", offsets)
        .end();
}

struct Quantization {};

void read(const At& at, Quantization&) {
    Ordered<Scheme> layers;
    std::optional<std::string> calibration;
    std::string activations;
    std::vector<std::string> weight_only;
    Fields(at)
        .unused<Scheme>("grid")
        .unused<std::optional<Scheme>>("lm_head")
        .field_or_default("layers", layers)
        .field_or_default("calibration", calibration)
        .field_or_default("activations", activations, one_of("full", "static_int8"))
        .field_or_default("weight_only", weight_only)
        .end();
}

void read(const At& at, ModelInfo& out) {
    std::optional<Quantization> quantization;
    std::optional<Ordered<std::string>> special_tokens;
    Fields(at)
        .field("name", out.name)
        .unused<std::string>("source")
        .unused<std::string>("family")
        .field("dtype", out.dtype, one_of("float16", "bfloat16", "float32"))
        .field("weights", out.weights, one_of("full", "int8", "int4", "fp8", "w8a8", "source"))
        .field_or_default("quantization", quantization)
        .field("vocab_size", out.vocab_size, positive)
        .field("hidden_size", out.hidden_size, positive)
        .field("layers", out.layers, positive)
        .field("heads", out.heads, positive)
        .field("kv_heads", out.kv_heads, positive)
        .field("head_dim", out.head_dim, positive)
        .field("max_capacity", out.max_capacity, capacity)
        .field("bos_token_id", out.bos_token_id)
        .field("eos_token_ids", out.eos_token_ids)
        .field_or_default("special_tokens", special_tokens)
        .end();
}

void read(const At& at, HeadInfo& out) {
    Fields(at)
        .field("rank", out.rank, positive)
        .field("width", out.width, positive)
        .field("blocks", out.blocks, positive)
        .end();
}

void read(const At& at, LookaheadInfo& out) {
    Fields(at)
        .field("length", out.length, lookahead)
        .unused<bool>("trained")
        .field("source", out.source)
        .field("adapter_rank", out.adapter_rank, natural)
        .field("acceptance_per_position", out.acceptance_per_position)
        .field_or_default("acceptance_per_position_sampled", out.acceptance_per_position_sampled)
        .field_or_default("head", out.head)
        .end();
}

struct Constants {};

void read(const At& at, Constants&) {
    Fields(at)
        .unused<Numbers>("row_position")
        .unused<std::vector<std::string>>("window_mask")
        .unused<Numbers>("logit_rows")
        .unused<Numbers>("lookahead_rows")
        .unused<std::vector<Numbers>>("draft_rows")
        .unused<Numbers>("lookahead_ids")
        .end();
}

void read(const At& at, PlanInfo& out) {
    Fields(at)
        .field("name", out.name)
        .unused<std::int64_t>("drafts", natural)
        .unused<Numbers>("groups")
        .field_or_default("parents", out.parents)
        .unused<std::string>("next")
        .unused<Constants>("constants")
        .field("tails", out.tails, keys(one_of("greedy", "sample", "truncated")))
        .end();
}

struct Noise {};

// The random tables baked into the sampling tails must be those of bundle/noise.h.
void read(const At& at, Noise&) {
    std::string scheme;
    std::int64_t members = 0, row = 0, bits = 0;
    Fields(at).field("scheme", scheme).field("members", members).field("row", row).field("bits", bits).end();
    if (scheme == noise_scheme && members == noise_block_size && row == noise_row_entries && bits == noise_bits) return;
    throw Error("noise scheme '" + one_line(scheme) + "' is not this version's '" + noise_scheme + "'; export again");
}

void read(const At& at, FileInfo& out) {
    Fields(at).field("sha256", out.sha256, sha256_text).field("bytes", out.bytes, natural).end();
}

void read(const At& at, Profile::Range& out) {
    Numbers numbers;
    read(at, numbers);
    const At place = numbers.size() < 3 ? at(std::to_string(numbers.size()), at.value) : at;
    place.require(numbers.size() == 3, "must be one of three numbers");
    out = {numbers[0], numbers[1], numbers[2]};
}

void read(const At& at, Profile& out) { Fields(at).field("sizes", out.sizes).end(); }

void read(const At& at, EngineFile& out) {
    Fields(at)
        .field("graph", out.graph, file_name)
        .field("file", out.file, file_name)
        .field("sha256", out.sha256, sha256_text)
        .field("bytes", out.bytes, natural)
        .field("profiles", out.profiles)
        .field("aliases", out.aliases)
        .end();
}

void read(const At& at, EngineSet& out) {
    const auto some = [](const At& of, const Numbers& list) { of.require(!list.empty(), "must not be empty"); };
    Fields(at)
        .field("directory", out.directory, file_name)
        .field("library", out.library, file_name)
        .field("version", out.version)
        .field("targets", out.targets)
        .field("bundle", out.bundle)
        .field("lookahead", out.lookahead, lookahead)
        .field("max_batch_size", out.max_batch_size, positive)
        .field("capacities", out.capacities, some)
        .field("prefill_widths", out.prefill_widths)
        .field("engines", out.engines)
        .end();
}

struct Version {};

// 3.0 is taken for 3, as in Python.
void read(const At& at, Version&) {
    if (at.value.is_number() && at.value == manifest_version) return;
    throw Error("manifest version " + one_line(at.value.dump()) + " is not " + std::to_string(manifest_version) +
                " (export again with this version)");
}

void read(const At& at, Manifest& out) {
    Fields(at)
        .unused<std::string>("format", one_of("pass-bundle"))
        .unused<Version>("version")
        .field("model", out.model)
        .field("lookahead", out.lookahead)
        .field("rule", out.rule, one_of("match", "rejection"))
        .field("trunk", out.trunk)
        .field("derived", out.derived)
        .field("plans", out.plans)
        .field("logprobs", out.logprobs)
        .field_or_default("processors", out.processors)
        .unused<Ordered<std::string>>("feeds")
        .unused<Noise>("noise")
        .field("files", out.files, keys(file_name))
        .unused<Ordered<std::string>>("tools")
        .field("engines", out.engines)
        .end();
}

Json parse(const std::string& text) {
    const auto not_too_deep = [](int depth, Json::parse_event_t, Json&) {
        if (depth > max_nesting) throw Error("file: Invalid JSON: recursion limit exceeded");
        return true;
    };
    if (text.starts_with("\xEF\xBB\xBF")) throw Error("file: Invalid JSON: it begins with a byte order mark");
    try {
        return Json::parse(text, not_too_deep);
    } catch (const Json::exception& error) {
        // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error ..."
        const std::string reason = error.what();
        throw Error("file: Invalid JSON: " +
                    one_line(reason.substr(std::min(reason.find("line "), reason.find("] ")))));
    }
}

}  // namespace

bool is_file_name(const std::string& name) {
    const auto plain = [](char c) {
        return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
    };
    const auto inside = [&](char c) { return plain(c) || c == '.' || c == '-'; };
    return !name.empty() && name.size() <= 100 && plain(name[0]) && std::all_of(name.begin(), name.end(), inside);
}

Manifest parse_manifest(const std::string& text) {
    const Json document = parse(text);
    Manifest found;
    read(At{document, ""}, found);
    return found;
}

}  // namespace pass
