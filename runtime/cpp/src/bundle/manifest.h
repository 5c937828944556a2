// The manifest of a bundle, pass_config.json, as structs. docs/bundle.md and
// pass_runtime/bundle/manifest.py explain the fields further.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
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
inline constexpr int manifest_version = 4;

// A JSON object: its keys and values in the order of the file.
template <class Value>
using OrderedMap = std::vector<std::pair<std::string, Value>>;

using Integers = std::vector<std::int64_t>;

// A dimension is a number, or a name if it is symbolic: batch, width, logit_rows, lookahead_rows,
// capacity, positions, max_emitted, processed_rows, touched. `BundleBindings` (bundle/bindings.h)
// knows what number each name stands for in a pass.
using Dimension = std::variant<std::int64_t, std::string>;

// An input or output of a graph. dtype: int64, int32, bool, float16, bfloat16 or float32.
struct Tensor {
    std::string name;
    std::string dtype;
    std::vector<Dimension> shape;
};

struct Graph {
    std::string file;
    std::vector<Tensor> inputs;
    std::vector<Tensor> outputs;

    // The input or output with this name; null if there is none.
    const Tensor* find(const std::string& name) const;
};

// The trunk rewritten for ONNX Runtime on one device: it has other nodes than the trunk, and the
// same inputs and outputs. On the CPU these nodes are operators of the kernels library. batch: the
// only batch size that it runs; none: it runs any. lookahead_rows: whether its windows may have
// look-ahead rows; a trunk that runs none computes the same bits in less time.
struct DerivedTrunk {
    std::string file;
    std::string device;
    std::optional<std::int64_t> batch;
    bool lookahead_rows = true;
};

// The exported model. dtype: the type of activations, KV cache and embeddings. weights: the format
// of the linear layers; "full": as `dtype`. max_capacity: the longest sequence that the model has
// positions for, in tokens.
struct ModelInfo {
    std::string name;
    std::string dtype;
    std::string weights;
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

// The draft head in the tails. rank: the size of a row of its table, which has a row for each
// token. width: the size of the state that it hands on from one draft to the next.
struct HeadInfo {
    std::int64_t rank = 0;
    std::int64_t width = 0;
};

// The look-ahead embeddings. length: L. source: the origin of the embeddings.
// acceptance_per_position: for i = 1, 2, ..., the share of the passes with drafts in which drafts 1
// to i were all accepted, with greedy sampling; empty if it was not measured.
// acceptance_per_position_sampled: the same at temperature 0.8.
struct LookaheadInfo {
    std::int64_t length = 0;
    std::string source;
    std::vector<double> acceptance_per_position;
    std::vector<double> acceptance_per_position_sampled;
    std::optional<HeadInfo> head;
};

// What the manifest says of a plan (bundle/plan.h): its name and its tail graphs.
struct PlanInfo {
    std::string name;
    Integers parents;         // the row that each draft of a tree follows; empty without a tree
    OrderedMap<Graph> tails;  // by sampler: greedy, sample, truncated

    // The tail for `sampler`; null if the plan has none.
    const Graph* tail(const std::string& sampler) const;
};

struct FileInfo {
    std::string sha256;
    std::int64_t bytes = 0;
};

// An optimization profile of an engine: by symbolic dimension, which sizes the engine runs.
struct Profile {
    struct Range {
        std::int64_t min = 0, max = 0;
    };
    OrderedMap<Range> sizes;

    // Whether `dimensions` has every name in `sizes`, with a size in the range of that name.
    bool admits(const std::map<std::string, std::int64_t>& dimensions) const;
};

// The engine `file` of the graph file `graph`. aliases: output -> the input whose memory it shares.
struct EngineFile {
    std::string graph;
    std::string file;
    std::string sha256;
    std::int64_t bytes = 0;
    std::vector<Profile> profiles;
    OrderedMap<std::string> aliases;
};

// The engines that one `pass-export build` made, in engines/<directory>. library, version: the
// library that built them. targets: the compute capabilities that they run on, such as `sm89`.
// bundle: `Manifest::content_hash` of the bundle that they were built from. lookahead: the length
// of draft chains and groups; all groups are full. capacities: KV capacities in tokens, in rising
// order. prefill_widths: rows of prompt chunks, in falling order, without 1, which always works.
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
    std::string rule;  // the acceptance rule: match or rejection
    Graph trunk;
    std::vector<DerivedTrunk> derived;
    std::vector<PlanInfo> plans;
    Graph logprobs;
    std::optional<Graph> processors;  // constraints, penalties, biases; none in older bundles
    OrderedMap<FileInfo> files;
    std::vector<EngineSet> engines;

    // The SHA-256 of the names and hashes of all graphs and weights. Engine sets that were built
    // from them have it as their `bundle`.
    std::string content_hash() const;

    // The derived trunk that ONNX Runtime runs on `device` in a session with `slots` slots; null if
    // that session runs `trunk` itself. A session runs one trunk at all batch sizes, so that a
    // sequence's text does not depend on the batch. lookahead_rows: whether the passes have
    // look-ahead rows. If several fit, a trunk for a fixed batch is preferred, then one that runs
    // no look-ahead rows: these are faster.
    const DerivedTrunk* derived_trunk(const std::string& device, int slots,
                                      bool lookahead_rows = true) const;

    // The trees of the bundle's plans. built: whether a tail, given its file, has been built for
    // the engine in use; a tree is left out unless all of its tails are built.
    std::vector<Tree> trees(const std::function<bool(const std::string&)>& built =
                                [](const std::string&) { return true; }) const;

    // The files of all graphs.
    std::set<std::string> graph_files() const;

    // The plan with this name. Throws Error if the bundle has none.
    const PlanInfo& plan(const std::string& name) const;

    // The size and hash of a file; null if the manifest does not list it.
    const FileInfo* file(const std::string& name) const;
};

// Whether `name` is a plain file name, which cannot point outside the bundle's directory.
bool is_file_name(const std::string& name);

// Parse the JSON `text`. Throws Error, which names the first field that is wrong, missing or new.
Manifest parse_manifest(const std::string& text);

// Throws Error if the manifest would make this runtime read or write memory that is not there, or
// use tensors that it does not know. Other contradictions are not looked for.
void check_consistency(const Manifest& manifest);

// Throws Error if trunk.onnx was exported from another model. stated: the JSON in its metadata.
void check_trunk_metadata(const Manifest& manifest, const std::string& stated);

// Parse and validate `bundle`/pass_config.json. Throws Error with the first problem.
Manifest read_manifest(const std::filesystem::path& bundle);

class HashCache;

// Throws Error unless every file of the bundle exists and is the one that was exported. hashes:
// whether to compare the files' hashes, or their sizes alone. cache: files whose hashes it has are
// not read; null: every file is read.
void verify_files(const std::filesystem::path& bundle, const Manifest& manifest, bool hashes = true,
                  HashCache* cache = nullptr);

}  // namespace pass
