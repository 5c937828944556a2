// The fields of pass_config.json, struct by struct, in the order of pass_runtime/bundle/manifest.py.

#include "bundle/manifest_read.h"

#include "bundle/strict_json.h"

namespace pass {

namespace {

using strict::Object;
using strict::Place;
using strict::read_file_name;
using strict::read_flag;
using strict::read_list;
using strict::read_mapping;
using strict::read_optional;
using strict::read_sha256;
using strict::read_share;
using strict::read_text;

void number(const Place& at, std::int64_t& out) { strict::read_number(at, out); }
void natural(const Place& at, std::int64_t& out) { strict::read_number(at, out, {.min = 0}); }
void positive(const Place& at, std::int64_t& out) { strict::read_number(at, out, {.positive = true}); }
void at_least_one(const Place& at, std::int64_t& out) { strict::read_number(at, out, {.min = 1}); }
void lookahead(const Place& at, std::int64_t& out) { strict::read_number(at, out, {.min = 1, .max = max_lookahead}); }
void numbers(const Place& at, Numbers& out) { read_list(at, out, number); }
void texts(const Place& at, std::vector<std::string>& out) { read_list(at, out, read_text); }
void mapping_of_texts(const Place& at, Ordered<std::string>& out) { read_mapping(at, out, read_text, read_text); }

// One of a few words.
template <class... Words>
auto choice(Words... words) {
    return [=](const Place& at, std::string& out) { strict::read_choice(at, out, {words...}); };
}

void dimension(const Place& at, Dimension& out) {
    if (at.value().is_number_integer()) {
        number(at, out.emplace<std::int64_t>());
    } else if (at.value().is_string()) {
        out = at.value().get<std::string>();
    } else {
        Place(at.value(), at, "int").refuse("Input should be a valid integer");
        Place(at.value(), at, "str").refuse("Input should be a valid string");
    }
}

void tensor(const Place& at, Tensor& out) {
    Object(at)
        .field("name", out.name, read_text)
        .field("dtype", out.dtype, choice("int64", "bool", "float16", "bfloat16", "float32"))
        .field("shape", out.shape, [](const Place& of, auto& shape) { read_list(of, shape, dimension); })
        .nothing_else();
}

void graph(const Place& at, Graph& out) {
    const auto tensors = [](const Place& of, std::vector<Tensor>& list) { read_list(of, list, tensor); };
    Object(at)
        .field("file", out.file, read_text)
        .field("inputs", out.inputs, tensors)
        .field("outputs", out.outputs, tensors)
        .nothing_else();
}

void derived_trunk(const Place& at, DerivedTrunk& out) {
    Object(at).field("file", out.file, read_file_name).field("device", out.device, choice("cpu")).nothing_else();
}

void scheme(const Place& at, SchemeInfo& out) {
    Object(at)
        .field("numbers", out.codes, choice("int8", "int4", "fp8"))
        .field("block_size", out.block_size, [](const Place& of, auto& size) { read_optional(of, size, positive); })
        .field("zero_points", out.zero_points, read_flag)
        .default_field("offsets", out.offset_columns, read_flag)
        .nothing_else();
}

void quantization(const Place& at, QuantizationInfo& out) {
    Object(at)
        .field("grid", out.scheme, scheme)
        .field("lm_head", out.lm_head, [](const Place& of, auto& value) { read_optional(of, value, scheme); })
        .default_field("layers", out.layers,
                       [](const Place& of, auto& value) { read_mapping(of, value, read_text, scheme); })
        .default_field("calibration", out.calibration,
                       [](const Place& of, auto& value) { read_optional(of, value, read_text); })
        .default_field("activations", out.activations, choice("full", "static_int8"))
        .default_field("weight_only", out.weight_only, texts)
        .nothing_else();
}

void max_capacity(const Place& at, std::int64_t& out) { strict::read_number(at, out, {.min = 4, .multiple_of = 4}); }

void model(const Place& at, ModelInfo& out) {
    Object(at)
        .field("name", out.name, read_text)
        .field("source", out.source, read_text)
        .field("family", out.family, read_text)
        .field("dtype", out.dtype, choice("float16", "bfloat16", "float32"))
        .field("weights", out.weights, choice("full", "int8", "int4", "fp8", "w8a8", "source"))
        .default_field("quantization", out.quantization,
                       [](const Place& of, auto& value) { read_optional(of, value, quantization); })
        .field("vocab_size", out.vocab_size, positive)
        .field("hidden_size", out.hidden_size, positive)
        .field("layers", out.layers, positive)
        .field("heads", out.heads, positive)
        .field("kv_heads", out.kv_heads, positive)
        .field("head_dim", out.head_dim, positive)
        .field("max_capacity", out.max_capacity, max_capacity)
        .field("bos_token_id", out.bos_token_id, [](const Place& of, auto& id) { read_optional(of, id, number); })
        .field("eos_token_ids", out.eos_token_ids, numbers)
        .nothing_else();
}

void head(const Place& at, HeadInfo& out) {
    Object(at)
        .field("rank", out.rank, positive)
        .field("width", out.width, positive)
        .field("blocks", out.blocks, positive)
        .nothing_else();
}

void lookahead_info(const Place& at, LookaheadInfo& out) {
    const auto shares = [](const Place& of, std::vector<double>& list) { read_list(of, list, read_share); };
    Object(at)
        .field("length", out.length, lookahead)
        .field("trained", out.trained, read_flag)
        .field("source", out.source, read_text)
        .field("adapter_rank", out.adapter_rank, natural)
        .field("acceptance_per_position", out.acceptance_per_position, shares)
        .default_field("acceptance_per_position_sampled", out.acceptance_per_position_sampled, shares)
        .default_field("head", out.head, [](const Place& of, auto& value) { read_optional(of, value, head); })
        .nothing_else();
}

void constants(const Place& at, ListedConstants& out) {
    Object(at)
        .field("row_position", out.row_position, numbers)
        .field("window_mask", out.window_mask, texts)
        .field("logit_rows", out.logit_rows, numbers)
        .field("lookahead_rows", out.lookahead_rows, numbers)
        .field("draft_rows", out.draft_rows, [](const Place& of, auto& rows) { read_list(of, rows, numbers); })
        .field("lookahead_ids", out.lookahead_ids, numbers)
        .nothing_else();
}

void plan(const Place& at, PlanInfo& out) {
    Object(at)
        .field("name", out.name, read_text)
        .field("drafts", out.drafts, natural)
        .field("groups", out.groups, numbers)
        .field("next", out.next, read_text)
        .field("constants", out.listed, constants)
        .field("tails", out.tails,
               [](const Place& of, auto& tails) {
                   read_mapping(of, tails, choice("greedy", "sample", "truncated"), graph);
               })
        .nothing_else();
}

void noise(const Place& at, NoiseInfo& out) {
    Object(at)
        .field("scheme", out.scheme, read_text)
        .field("members", out.block_size, number)
        .field("row", out.row, number)
        .field("bits", out.bits, number)
        .nothing_else();
}

void file_info(const Place& at, FileInfo& out) {
    Object(at).field("sha256", out.sha256, read_sha256).field("bytes", out.bytes, natural).nothing_else();
}

void range(const Place& at, Profile::Range& out) {
    if (!at.value().is_array()) return at.refuse("Input should be a valid array");
    if (const std::size_t size = at.value().size(); size > 3) {
        return at.refuse("Tuple should have at most 3 items after validation, not " + std::to_string(size));
    }
    std::int64_t* const parts[] = {&out.min, &out.opt, &out.max};
    for (std::size_t i = 0; i < 3; ++i) {
        if (i < at.value().size()) {
            number(Place(at.value()[i], at, std::to_string(i)), *parts[i]);
        } else {
            Place(at.value(), at, std::to_string(i)).refuse("Field required");
        }
    }
}

void profile(const Place& at, Profile& out) {
    Object(at)
        .field("sizes", out.sizes, [](const Place& of, auto& sizes) { read_mapping(of, sizes, read_text, range); })
        .nothing_else();
}

void engine_file(const Place& at, EngineFile& out) {
    Object(at)
        .field("graph", out.graph, read_file_name)
        .field("file", out.file, read_file_name)
        .field("sha256", out.sha256, read_sha256)
        .field("bytes", out.bytes, natural)
        .field("profiles", out.profiles, [](const Place& of, auto& list) { read_list(of, list, profile); })
        .field("aliases", out.aliases, mapping_of_texts)
        .nothing_else();
}

void engine_set(const Place& at, EngineSet& out) {
    Object(at)
        .field("directory", out.directory, read_file_name)
        .field("library", out.library, read_file_name)
        .field("version", out.version, read_text)
        .field("targets", out.targets, texts)
        .field("bundle", out.bundle, read_text)
        .field("lookahead", out.lookahead, lookahead)
        .field("max_batch_size", out.max_batch_size, at_least_one)
        .field("capacities", out.capacities, [](const Place& of, Numbers& list) { read_list(of, list, number, false); })
        .field("prefill_widths", out.prefill_widths, numbers)
        .field("engines", out.engines, [](const Place& of, auto& list) { read_list(of, list, engine_file); })
        .nothing_else();
}

// 3.0 is taken for 3, as in Python.
void version(const Place& at, std::int64_t& out) {
    out = manifest_version;
    if (!at.value().is_number() || at.value().get<double>() != manifest_version) at.refuse("Input should be 3");
}

void manifest(const Place& at, Manifest& out) {
    std::string format;
    std::int64_t number_of_version = 0;
    Object(at)
        .field("format", format, choice("pass-bundle"))
        .field("version", number_of_version, version)
        .field("model", out.model, model)
        .field("lookahead", out.lookahead, lookahead_info)
        .field("rule", out.rule, choice("match", "rejection"))
        .field("trunk", out.trunk, graph)
        .field("derived", out.derived, [](const Place& of, auto& list) { read_list(of, list, derived_trunk); })
        .field("plans", out.plans, [](const Place& of, auto& list) { read_list(of, list, plan); })
        .field("logprobs", out.logprobs, graph)
        .field("feeds", out.feeds, mapping_of_texts)
        .field("noise", out.noise, noise)
        .field("files", out.files,
               [](const Place& of, auto& files) { read_mapping(of, files, read_file_name, file_info); })
        .field("tools", out.tools, mapping_of_texts)
        .field("engines", out.engines, [](const Place& of, auto& list) { read_list(of, list, engine_set); })
        .nothing_else();
}

std::string first_problem(const strict::Problems& problems) {
    if (problems.unknown_key) {
        return "unknown key " + strict::repr(std::string_view(problems.where)) +
               " (made by a newer pass-export? upgrade, or export again)";
    }
    if (problems.where == "version" && problems.message != "Field required") {
        return "manifest version " + strict::repr(problems.input) + " is not " + std::to_string(manifest_version) +
               " (export again with this version)";
    }
    const std::string more = problems.count > 1 ? ", and " + std::to_string(problems.count - 1) + " more" : "";
    return (problems.where.empty() ? "file" : problems.where) + ": " + problems.message + more;
}

}  // namespace

Manifest parse_manifest(const std::string& text) {
    strict::Json document;
    try {
        document = strict::parse(text);
    } catch (const std::invalid_argument& error) {
        throw Error("file: Invalid JSON: " + std::string(error.what()));
    }
    Manifest found;
    strict::Problems problems;
    manifest(Place(document, problems), found);
    if (problems.count > 0) throw Error(first_problem(problems));
    return found;
}

}  // namespace pass
