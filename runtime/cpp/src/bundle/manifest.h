// pass_config.json, the contract between exporter, runtimes and servers (docs/bundle.md). As
// pass_runtime.bundle.manifest, which explains more of the fields.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "bundle/plan.h"

namespace pass {

inline constexpr const char* manifest_file = "pass_config.json";
inline constexpr const char* tokenizer_file = "tokenizer.json";
inline constexpr const char* chat_template_files[] = {"chat_template.jinja",
                                                      "chat_template.tool_use.jinja"};
inline constexpr const char* engines_directory = "engines";
inline constexpr int manifest_version = 3;

// A mapping in the order of the file.
template <class Value>
using OrderedMap = std::vector<std::pair<std::string, Value>>;

using Integers = std::vector<std::int64_t>;

// A dimension is a number, or a name if it is symbolic: batch, width, logit_rows, lookahead_rows,
// capacity, positions, max_emitted, processed_rows, touched. `BundleBindings` (bundle/bindings.h)
// gives them their sizes.
using Dimension = std::variant<std::int64_t, std::string>;

// A graph input or output. dtype: int64, int32, bool, float16, bfloat16 or float32.
struct Tensor {
    std::string name;
    std::string dtype;
    std::vector<Dimension> shape;
};

struct Graph {
    std::string file;
    std::vector<Tensor> inputs;
    std::vector<Tensor> outputs;

    // An input or output by its name; null if there is none.
    const Tensor* find(const std::string& name) const;
};

// The trunk rewritten for ONNX Runtime on one device: other nodes, the same tensors, the same file
// of weights. batch: the only batch size that it runs; empty is any. With batch 1 on the CPU, a
// pass may overwrite the cache entry after its window, so the cache needs a spare entry.
// lookahead_rows: whether its windows may have look-ahead rows. A trunk without them computes the
// same bits in less time. weight_zero_points: whether 8-bit weights with a scale for each output
// have zero points (all 0), so that ONNX Runtime can make them unsigned.
struct DerivedTrunk {
    std::string file;
    std::string device;
    std::optional<std::int64_t> batch;
    bool lookahead_rows = true;
    bool weight_zero_points = false;
    // How many cache entries after its window a pass may overwrite.
    std::int64_t spare_entries() const { return device == "cpu" && batch ? 1 : 0; }
};

// How weights are stored. numbers: int8, int4 or fp8. block_size: how many inputs share a scale;
// none: all inputs of an output. offsets: whether the values of a block also share an offset.
struct SchemeInfo {
    std::string numbers;
    std::optional<std::int64_t> block_size;
    bool offsets = false;
};

// grid: the default scheme of decoder layers. lm_head: its scheme, if it is quantized. layers:
// schemes of single decoder layers, by name. activations: "full" or "static_int8".
struct QuantizationInfo {
    SchemeInfo grid;
    std::optional<SchemeInfo> lm_head;
    OrderedMap<SchemeInfo> layers;
    std::string activations = "full";
};

// The model. dtype: of activations, cache and embeddings. weights: the format of the linear layers;
// "full": they have the type `dtype`. max_capacity: its longest sequence, in tokens.
struct ModelInfo {
    std::string name;
    std::string dtype;
    std::string weights;
    std::optional<QuantizationInfo> quantization;  // none for "full", and in older bundles
    std::int64_t vocab_size = 0;
    std::int64_t hidden_size = 0;
    std::int64_t layers = 0;
    std::int64_t heads = 0;
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
    std::int64_t max_capacity = 0;
    std::optional<std::int64_t> bos_token_id;
    Integers eos_token_ids;
};

// The tails' draft head. rank: size of a token's row in its table. width: size of its state.
struct HeadInfo {
    std::int64_t rank = 0;
    std::int64_t width = 0;
};

// The look-ahead embeddings. source: their origin. acceptance_per_position: for i = 1, 2, ..., the
// share of the passes with drafts in which drafts 1..i were all accepted, greedily or sampled;
// empty if it was not measured.
struct LookaheadInfo {
    std::int64_t length = 0;
    std::string source;
    std::vector<double> acceptance_per_position;
    std::vector<double> acceptance_per_position_sampled;
    std::optional<HeadInfo> head;
};

// The name of a plan (bundle/plan.h) and its tail graphs.
struct PlanInfo {
    std::string name;
    Integers parents;         // of a tree: the row that each draft follows
    OrderedMap<Graph> tails;  // by sampler: greedy, sample, truncated

    // Null if the plan has no tail for `sampler`.
    const Graph* tail(const std::string& sampler) const;
};

struct FileInfo {
    std::string sha256;
    std::int64_t bytes = 0;
};

// The shapes that an engine runs, by symbolic dimension.
struct Profile {
    struct Range {
        std::int64_t min = 0, max = 0;
    };
    OrderedMap<Range> sizes;

    // Whether all names in `sizes` are dimensions, each in its range.
    bool admits(const std::map<std::string, std::int64_t>& dimensions) const;
};

// The engine of `graph`, in `file`. aliases: output -> the input whose memory it shares.
struct EngineFile {
    std::string graph;
    std::string file;
    std::string sha256;
    std::int64_t bytes = 0;
    std::vector<Profile> profiles;
    OrderedMap<std::string> aliases;
};

// What one `pass-export build` made, in engines/<directory>. library, version: the library that
// built it. bundle: `Manifest::content` of the bundle that it was built from. targets: compute
// capabilities, such as `sm89`. lookahead: the most drafts of its plans, whose groups all have full
// size. capacities: numbers of KV cache entries that a pass may read, in rising order.
// prefill_widths: tokens in a prompt chunk, in falling order, without 1, which is always possible.
struct EngineSet {
    std::string directory;
    std::string library;
    std::string version;
    std::vector<std::string> targets;
    std::string bundle;
    std::int64_t lookahead = 0;
    std::int64_t max_batch_size = 0;
    Integers capacities;
    Integers prefill_widths;
    std::vector<EngineFile> engines;
};

struct Manifest {
    ModelInfo model;
    LookaheadInfo lookahead;
    std::string rule;  // by which drafts are accepted: match or rejection
    Graph trunk;
    std::vector<DerivedTrunk> derived;
    std::vector<PlanInfo> plans;
    Graph logprobs;
    std::optional<Graph> processors;  // constraints, penalties, biases; none in older bundles
    OrderedMap<FileInfo> files;
    std::vector<EngineSet> engines;

    // A hash of the hashes of all graphs and weights. An engine set fits if its `bundle` is equal.
    std::string content_hash() const;

    // The trunk that ONNX Runtime runs on `device` in a session with so many slots; null if it is
    // `trunk`. It is the same for every batch size of a session, so that a sequence's text does not
    // depend on the batch. lookahead_rows: whether the passes have look-ahead rows. Prefers a trunk
    // for a fixed batch, then one without look-ahead rows.
    const DerivedTrunk* derived_trunk(const std::string& device, int slots,
                                      bool lookahead_rows = true) const;

    // The trees whose tails are all built. built: whether there is an engine for a tail's file.
    std::vector<Tree> trees(const std::function<bool(const std::string&)>& built =
                                [](const std::string&) { return true; }) const;

    // Throws Error if the bundle has no such plan.
    const PlanInfo& plan(const std::string& name) const;

    // Null if the bundle has no such file.
    const FileInfo* file(const std::string& name) const;
};

// Whether `name` is a plain file name, which cannot point outside the bundle's directory.
bool is_file_name(const std::string& name);

// The manifest in `text`. Throws Error with the first field that is wrong, missing or unknown.
Manifest parse_manifest(const std::string& text);

// Throws Error if the manifest would make this runtime read or write memory that is not there, or
// use tensors that it does not know. Finds no other contradictions.
void check_consistency(const Manifest& manifest);

// Throws Error if trunk.onnx was exported from another model. stated: the JSON in its metadata.
void check_trunk_metadata(const Manifest& manifest, const std::string& stated);

// Parse and validate `bundle`/pass_config.json. Throws Error with the first problem.
Manifest read_manifest(const std::filesystem::path& bundle);

class HashCache;

// Throws Error unless every file of the bundle exists and is the one that was exported. hashes:
// false compares sizes only. cache: files whose hashes it has are not read; null reads every file.
void verify_files(const std::filesystem::path& bundle, const Manifest& manifest, bool hashes = true,
                  HashCache* cache = nullptr);

}  // namespace pass
