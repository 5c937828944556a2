// The manifest of a bundle, pass_config.json, as structs. docs/bundle.md explains the fields.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace pass {

inline constexpr const char* manifest_file = "pass_config.json";
inline constexpr const char* tokenizer_file = "tokenizer.json";
inline constexpr int manifest_version = 5;

using Integers = std::vector<std::int64_t>;

// A number, or the name of a size that differs between passes, such as batch or capacity.
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
};

// The trunk rewritten for one device, with the same inputs and outputs. batch: the only batch size
// that it runs. lookahead_rows: whether windows may have such rows.
struct DerivedTrunk {
    std::string file;
    std::string device;
    std::optional<std::int64_t> batch;
    bool lookahead_rows = true;
};

// dtype: of activations, KV cache and embeddings. weights: of the linear layers; "full": as dtype.
// max_capacity: the longest sequence that the model has positions for, in tokens.
struct ModelInfo {
    std::string name;
    std::string dtype;
    std::string weights;
    std::int64_t vocab_size = 0;
    std::int64_t hidden_size = 0;
    std::int64_t heads = 0;
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
    std::int64_t max_capacity = 0;
    std::optional<std::int64_t> bos_token_id;
    Integers eos_token_ids;
};

// length: L. acceptance_per_position: for i = 1, 2, ..., the share of passes that accepted drafts 1
// to i, greedily; empty if not measured. ..._sampled: at temperature 0.8.
struct LookaheadInfo {
    std::int64_t length = 0;
    std::string source;
    std::vector<double> acceptance_per_position;
    std::vector<double> acceptance_per_position_sampled;
};

struct FileInfo {
    std::string sha256;
    std::int64_t bytes = 0;
};

// An optimization profile of an engine: which sizes it runs, by the dimension's name.
struct Profile {
    struct Range {
        std::int64_t min = 0, max = 0;
    };
    std::map<std::string, Range> sizes;

    // Whether `dimensions` has every name in `sizes`, with a size in its range.
    bool admits(const std::map<std::string, std::int64_t>& dimensions) const;
};

// The engine of the graph file `graph`. aliases: output -> the input whose memory it shares.
struct EngineFile {
    std::string graph;
    std::string file;
    FileInfo info;
    std::vector<Profile> profiles;
    std::map<std::string, std::string> aliases;
};

// What one `pass-export build` made. library, version: what built it. targets: compute
// capabilities, such as `sm89`. bundle: `content_hash` of the bundle then. lookahead: of all chains
// and groups. capacities: in tokens, rising. prefill_widths: falling, without 1, which always
// works.
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

using Tails = std::map<std::string, Graph>;  // by sampler: greedy, sample, truncated

struct Manifest {
    ModelInfo model;
    LookaheadInfo lookahead;
    std::string rule;  // the acceptance rule: match or rejection
    Graph trunk;
    std::vector<DerivedTrunk> derived;
    std::map<std::string, Tails> windows;  // by the window's name
    Graph logprobs;
    Graph processors;  // constraints, penalties, biases
    std::map<std::string, FileInfo> files;
    std::vector<EngineSet> engines;

    // The SHA-256 of the names and hashes of all graphs and weights.
    std::string content_hash() const;

    // Of a session with `slots` slots, preferably one for that batch alone, or for windows without
    // look-ahead rows; null: `trunk`. A session runs one trunk at all batch sizes, so that a text
    // does not depend on the batch.
    const DerivedTrunk* derived_trunk(const std::string& device, int slots,
                                      bool lookahead_rows = true) const;

    // The files of all graphs.
    std::set<std::string> graph_files() const;
};

// Parse the JSON `text`. Throws Error, which names `path`, if it is no manifest, of another
// version, or has not the digest that it states.
Manifest parse_manifest(const std::string& text, const std::string& path);

// Parse `bundle`/pass_config.json. Throws Error.
Manifest read_manifest(const std::filesystem::path& bundle);

}  // namespace pass
