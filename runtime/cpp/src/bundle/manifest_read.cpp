// Reads pass_config.json into a `Manifest`. The fields are in the order of
// pass_runtime/bundle/manifest.py, and those that this runtime does not need are checked, too, so
// that both runtimes accept the same bundles.

#include <algorithm>
#include <nlohmann/json.hpp>

#include "bundle/manifest.h"
#include "bundle/noise.h"
#include "errors.h"
#include "utf8.h"

namespace pass {

namespace {

using Json = nlohmann::ordered_json;

constexpr int max_nesting = 200;  // depth of lists and objects; Python's reader has the same limit
constexpr std::int64_t max_number = std::int64_t{1} << 53;  // so that sums cannot overflow

// A value and its place in the document, such as `model.vocab_size`.
struct JsonNode {
    const Json& value;
    std::string path;

    // The node of the field or list item `inner` of this value. key: its name or index.
    JsonNode operator()(const std::string& key, const Json& inner) const {
        return {inner, path.empty() ? key : path + "." + key};
    }
    void require(bool holds, const std::string& what) const {
        if (!holds) throw Error((path.empty() ? "file" : one_line(path)) + ": " + what);
    }
};

void read(const JsonNode& node, std::string& out) {
    node.require(node.value.is_string(), "must be a string");
    out = node.value.get<std::string>();
}

void read(const JsonNode& node, bool& out) {
    node.require(node.value.is_boolean(), "must be true or false");
    out = node.value.get<bool>();
}

void read(const JsonNode& node, std::int64_t& out) {
    const bool small =
        node.value.is_number_unsigned()
            ? node.value.get<std::uint64_t>() <= max_number
            : node.value.is_number_integer() && node.value.get<std::int64_t>() >= -max_number;
    node.require(small, "must be a whole number of at most 2^53");
    out = node.value.get<std::int64_t>();
}

// A share, from 0 to 1.
void read(const JsonNode& node, double& out) {
    node.require(node.value.is_number(), "must be a number");
    out = node.value.get<double>();
    node.require(out >= 0 && out <= 1, "must be 0 to 1");
}

void read(const JsonNode& node, Dimension& out) {
    if (node.value.is_string()) {
        out = node.value.get<std::string>();
    } else {
        read(node, out.emplace<std::int64_t>());
    }
}

template <class T>
void read(const JsonNode& node, std::optional<T>& out) {
    if (!node.value.is_null()) read(node, out.emplace());
}

template <class T>
void read(const JsonNode& node, std::vector<T>& out) {
    node.require(node.value.is_array(), "must be a list");
    for (const Json& item : node.value) {
        const JsonNode inner = node(std::to_string(out.size()), item);
        read(inner, out.emplace_back());
    }
}

template <class T>
void read(const JsonNode& node, OrderedMap<T>& out) {
    node.require(node.value.is_object(), "must be an object");
    for (const auto& [key, item] : node.value.items()) {
        auto& [name, value] = out.emplace_back(key, T());
        read(node(name, item), value);
    }
}

// The functions from here to `Fields` are rules: they check a value that has the right type, and
// throw Error if it is wrong. This one accepts any value.
struct Any {
    template <class T>
    void operator()(const JsonNode&, const T&) const {}
};

auto in_range(std::int64_t min, std::int64_t max = max_number) {
    return [=](const JsonNode& node, std::int64_t number) {
        node.require(
            number >= min && number <= max,
            "must be " + (max == max_number ? "at least " + std::to_string(min)
                                            : std::to_string(min) + " to " + std::to_string(max)));
    };
}
const auto positive = in_range(1), not_negative = in_range(0),
           lookahead_range = in_range(1, max_lookahead);

// TensorRT needs a multiple of 4.
void is_capacity(const JsonNode& node, std::int64_t number) {
    node.require(number >= 4 && number % 4 == 0, "must be a positive multiple of 4");
}

void is_plain_file_name(const JsonNode& node, const std::string& name) {
    node.require(is_file_name(name),
                 "is not a plain file name, so it could point outside the bundle");
}

void is_sha256(const JsonNode& node, const std::string& text) {
    node.require(
        text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos,
        "must be a SHA-256");
}

template <class... Words>
auto one_of(Words... words) {
    return [=](const JsonNode& node, const std::string& text) {
        node.require(((text == words) || ...),
                     ("must be one of" + ... + (std::string(" ") + words)));
    };
}

// A rule that applies `rule` to each key of a mapping.
template <class Rule>
auto each_key(Rule rule) {
    return [=](const JsonNode& node, const auto& mapping) {
        for (const auto& [name, value] : mapping) rule(node(name, node.value), name);
    };
}

// Reads the fields of an object one by one. Then `end` refuses the fields that nobody read.
class Fields {
   public:
    explicit Fields(const JsonNode& node) : node_(node) {
        node.require(node.value.is_object(), "must be an object");
    }

    template <class T, class Rule = Any>
    Fields& field(const char* name, T& out, const Rule& rule = {}) {
        node_(name, node_.value).require(node_.value.contains(name), "is missing");
        return field_or_default(name, out, rule);
    }
    // Read a field that may be missing; `out` then stays as it is.
    template <class T, class Rule = Any>
    Fields& field_or_default(const char* name, T& out, const Rule& rule = {}) {
        read_.emplace_back(name);
        const auto item = node_.value.find(name);
        if (item == node_.value.end()) return *this;
        const JsonNode node = node_(name, *item);
        read(node, out);
        rule(node, out);
        return *this;
    }
    // Check a field that this runtime does not need.
    template <class T, class Rule = Any>
    Fields& checked(const char* name, const Rule& rule = {}) {
        T unused{};
        return field(name, unused, rule);
    }
    void end() const {
        for (const auto& [key, value] : node_.value.items()) {
            if (std::find(read_.begin(), read_.end(), key) != read_.end()) continue;
            throw Error("unknown key '" + one_line(node_(key, value).path) +
                        "' (made by a newer pass-export? upgrade, or export again)");
        }
    }

   private:
    const JsonNode& node_;
    std::vector<std::string> read_;
};

void read(const JsonNode& node, Tensor& out) {
    Fields(node)
        .field("name", out.name)
        .field("dtype", out.dtype,
               one_of("int64", "int32", "bool", "float16", "bfloat16", "float32"))
        .field("shape", out.shape)
        .end();
}

void read(const JsonNode& node, Graph& out) {
    Fields(node)
        .field("file", out.file)
        .field("inputs", out.inputs)
        .field("outputs", out.outputs)
        .end();
}

void read(const JsonNode& node, DerivedTrunk& out) {
    const auto is_one = [](const JsonNode& field, const std::optional<std::int64_t>& size) {
        field.require(size.value_or(1) == 1, "must be 1 or null");
    };
    Fields(node)
        .field("file", out.file, is_plain_file_name)
        .field("device", out.device, one_of("cpu", "cuda"))
        .field_or_default("batch", out.batch, is_one)
        .field_or_default("lookahead_rows", out.lookahead_rows)
        .end();
}

// Objects of the manifest that are checked and then dropped: their structs have no members.
struct Scheme {};
struct Quantization {};
struct Constants {};
struct Noise {};
struct Version {};

void read(const JsonNode& node, Scheme&) {
    bool offsets = false;
    const auto none_or_positive = [](const JsonNode& field,
                                     const std::optional<std::int64_t>& size) {
        positive(field, size.value_or(1));
    };
    Fields(node)
        .checked<std::string>("numbers", one_of("int8", "int4", "fp8"))
        .checked<std::optional<std::int64_t>>("block_size", none_or_positive)
        .checked<bool>("zero_points")
        .field_or_default("offsets", offsets)
        .end();
}

void read(const JsonNode& node, Quantization&) {
    OrderedMap<Scheme> layers;
    std::optional<std::string> calibration;
    Fields(node)
        .checked<Scheme>("grid")
        .checked<std::optional<Scheme>>("lm_head")
        .field_or_default("layers", layers)
        .field_or_default("calibration", calibration)
        .end();
}

void read(const JsonNode& node, ModelInfo& out) {
    std::optional<Quantization> quantization;
    std::optional<OrderedMap<std::string>> special_tokens;
    Fields(node)
        .field("name", out.name)
        .checked<std::string>("source")
        .checked<std::string>("family")
        .field("dtype", out.dtype, one_of("float16", "bfloat16", "float32"))
        .field("weights", out.weights, one_of("full", "int8", "int4", "fp8"))
        .field_or_default("quantization", quantization)
        .field("vocab_size", out.vocab_size, positive)
        .field("hidden_size", out.hidden_size, positive)
        .field("layers", out.layers, positive)
        .field("heads", out.heads, positive)
        .field("kv_heads", out.kv_heads, positive)
        .field("head_dim", out.head_dim, positive)
        .field("max_capacity", out.max_capacity, is_capacity)
        .field("bos_token_id", out.bos_token_id)
        .field("eos_token_ids", out.eos_token_ids)
        .field_or_default("special_tokens", special_tokens)
        .end();
}

void read(const JsonNode& node, HeadInfo& out) {
    Fields(node)
        .field("rank", out.rank, positive)
        .field("width", out.width, positive)
        .checked<std::int64_t>("blocks", positive)
        .end();
}

void read(const JsonNode& node, LookaheadInfo& out) {
    Fields(node)
        .field("length", out.length, lookahead_range)
        .checked<bool>("trained")
        .field("source", out.source)
        .checked<std::int64_t>("adapter_rank", not_negative)
        .field("acceptance_per_position", out.acceptance_per_position)
        .field_or_default("acceptance_per_position_sampled", out.acceptance_per_position_sampled)
        .field_or_default("head", out.head)
        .end();
}

void read(const JsonNode& node, Constants&) {
    Fields(node)
        .checked<Integers>("row_position")
        .checked<std::vector<std::string>>("window_mask")
        .checked<Integers>("logit_rows")
        .checked<Integers>("lookahead_rows")
        .checked<std::vector<Integers>>("draft_rows")
        .checked<Integers>("lookahead_ids")
        .end();
}

void read(const JsonNode& node, PlanInfo& out) {
    Fields(node)
        .field("name", out.name)
        .checked<std::int64_t>("drafts", not_negative)
        .checked<Integers>("groups")
        .field_or_default("parents", out.parents)
        .checked<std::string>("next")
        .checked<Constants>("constants")
        .field("tails", out.tails, each_key(one_of("greedy", "sample", "truncated")))
        .end();
}

// The sampling tails must be made for the noise of bundle/noise.h.
void read(const JsonNode& node, Noise&) {
    std::string scheme;
    std::int64_t members = 0, row = 0, bits = 0;
    Fields(node)
        .field("scheme", scheme)
        .field("members", members)
        .field("row", row)
        .field("bits", bits)
        .end();
    if (scheme == noise_scheme && members == noise_block_size && row == noise_row_entries &&
        bits == noise_bits)
        return;
    throw Error("noise scheme '" + one_line(scheme) +
                "' or its table sizes are not this version's '" + noise_scheme + "'; export again");
}

void read(const JsonNode& node, FileInfo& out) {
    Fields(node)
        .field("sha256", out.sha256, is_sha256)
        .field("bytes", out.bytes, not_negative)
        .end();
}

void read(const JsonNode& node, Profile::Range& out) {
    Integers numbers;
    read(node, numbers);
    // As in Python, the error names the first number that is missing, or else the list.
    const JsonNode wrong =
        numbers.size() < 3 ? node(std::to_string(numbers.size()), node.value) : node;
    wrong.require(numbers.size() == 3, "must be one of three numbers");
    out = {numbers[0], numbers[2]};  // numbers[1] is the size that the engine was tuned for
}

void read(const JsonNode& node, Profile& out) { Fields(node).field("sizes", out.sizes).end(); }

void read(const JsonNode& node, EngineFile& out) {
    Fields(node)
        .field("graph", out.graph, is_plain_file_name)
        .field("file", out.file, is_plain_file_name)
        .field("sha256", out.sha256, is_sha256)
        .field("bytes", out.bytes, not_negative)
        .field("profiles", out.profiles)
        .field("aliases", out.aliases)
        .end();
}

void read(const JsonNode& node, EngineSet& out) {
    const auto all_positive = [](const JsonNode& field, const Integers& list) {
        for (std::size_t i = 0; i < list.size(); ++i)
            positive(field(std::to_string(i), field.value[i]), list[i]);
    };
    const auto one_or_more_positive = [&](const JsonNode& field, const Integers& list) {
        field.require(!list.empty(), "must not be empty");
        all_positive(field, list);
    };
    Fields(node)
        .field("directory", out.directory, is_plain_file_name)
        .field("library", out.library, is_plain_file_name)
        .field("version", out.version)
        .field("targets", out.targets)
        .field("bundle", out.bundle)
        .field("lookahead", out.lookahead, lookahead_range)
        .field("max_batch_size", out.max_batch_size, positive)
        .field("capacities", out.capacities, one_or_more_positive)
        .field("prefill_widths", out.prefill_widths, all_positive)
        .field("engines", out.engines)
        .end();
}

// 3.0 is taken for 3, as in Python.
void read(const JsonNode& node, Version&) {
    if (node.value.is_number() && node.value == manifest_version) return;
    throw Error("manifest version " + one_line(node.value.dump()) + " is not " +
                std::to_string(manifest_version) + " (export again with this version)");
}

void read(const JsonNode& node, Manifest& out) {
    Fields(node)
        .checked<std::string>("format", one_of("pass-bundle"))
        .checked<Version>("version")
        .field("model", out.model)
        .field("lookahead", out.lookahead)
        .field("rule", out.rule, one_of("match", "rejection"))
        .field("trunk", out.trunk)
        .field("derived", out.derived)
        .field("plans", out.plans)
        .field("logprobs", out.logprobs)
        .field_or_default("processors", out.processors)
        .checked<OrderedMap<std::string>>("feeds")
        .checked<Noise>("noise")
        .field("files", out.files, each_key(is_plain_file_name))
        .checked<OrderedMap<std::string>>("tools")
        .field("engines", out.engines)
        .end();
}

Json parse(const std::string& text) {
    const auto limit_depth = [](int depth, Json::parse_event_t, Json&) {
        if (depth > max_nesting) throw Error("file: Invalid JSON: recursion limit exceeded");
        return true;
    };
    if (text.starts_with("\xEF\xBB\xBF"))
        throw Error("file: Invalid JSON: it begins with a byte order mark");
    try {
        return Json::parse(text, limit_depth);
    } catch (const Json::exception& error) {
        // It is "[json.exception.parse_error.101] parse error at line 1, column 2: ...".
        const std::string reason = error.what();
        throw Error("file: Invalid JSON: " +
                    one_line(reason.substr(std::min(reason.find("line "), reason.find("] ")))));
    }
}

}  // namespace

bool is_file_name(const std::string& name) {
    const auto plain = [](char c) {
        return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
               c == '_';
    };
    const auto inside = [&](char c) { return plain(c) || c == '.' || c == '-'; };
    return !name.empty() && name.size() <= 100 && plain(name[0]) &&
           std::all_of(name.begin(), name.end(), inside);
}

Manifest parse_manifest(const std::string& text) {
    const Json document = parse(text);
    Manifest result;
    read(JsonNode{document, ""}, result);
    return result;
}

}  // namespace pass
