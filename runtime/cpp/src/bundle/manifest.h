// pass_config.json: the contract between exporter, runtimes and servers (docs/bundle.md). As
// pass_runtime.bundle.manifest.
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
inline constexpr const char* chat_template_files[] = {"chat_template.jinja", "chat_template.tool_use.jinja"};
inline constexpr const char* engines_directory = "engines";
inline constexpr int manifest_version = 3;

// A mapping in the order of the file.
template <class Value>
using Ordered = std::vector<std::pair<std::string, Value>>;

using Numbers = std::vector<std::int64_t>;

// A dimension is a number, or a name if it is symbolic: batch, width, logit_rows, lookahead_rows, capacity,
// positions, max_emitted.
using Dimension = std::variant<std::int64_t, std::string>;

// A graph input or output. dtype: int64, bool, float16, bfloat16 or float32.
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

// The trunk rewritten for the engine of one device: other nodes, same tensors, same file of weights.
// batch: the only batch size that it runs; empty is any. A trunk for one sequence on the CPU may overwrite the entry
// of the KV cache after its window, so the cache must have one beyond the capacity in use. lookahead_rows: whether its
// windows may have look-ahead rows. Without them it computes the same bits as the one with them, in less time.
struct DerivedTrunk {
    std::string file;
    std::string device;
    std::optional<std::int64_t> batch;
    bool lookahead_rows = true;
    // How many entries of the KV cache after its window a pass may overwrite.
    std::int64_t spare_entries() const { return device == "cpu" && batch ? 1 : 0; }
};

// The frozen model. dtype: of activations, cache and embeddings; weights: of the linear layers, "full" is dtype.
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
    Numbers eos_token_ids;
};

// The draft head: the size of a token's row in its table, the size of its state, the blocks that hold its candidates.
struct HeadInfo {
    std::int64_t rank = 0;
    std::int64_t width = 0;
    std::int64_t blocks = 0;
};

struct LookaheadInfo {
    std::int64_t length = 0;
    std::string source;
    std::int64_t adapter_rank = 0;
    std::vector<double> acceptance_per_position;
    std::vector<double> acceptance_per_position_sampled;
    std::optional<HeadInfo> head;

    // Whether the trunk must know which of a window's rows are look-ahead rows.
    bool reads_rows() const { return adapter_rank > 0 || head.has_value(); }
};

// A plan by its name, from which its layout and constants follow (bundle/plan.h), and its tail graphs.
struct PlanInfo {
    std::string name;
    Numbers parents;       // of a tree: the row that each draft follows
    Ordered<Graph> tails;  // by sampler: greedy, sample, truncated

    // Null if the plan has no tail for `sampler`.
    const Graph* tail(const std::string& sampler) const;
};

struct FileInfo {
    std::string sha256;
    std::int64_t bytes = 0;
};

// An engine's optimization profile: (min, opt, max) by symbolic dimension.
struct Profile {
    struct Range {
        std::int64_t min = 0, opt = 0, max = 0;
    };
    Ordered<Range> sizes;

    bool admits(const std::map<std::string, std::int64_t>& of) const;
};

// The engine of `graph`, in `file` of the set's directory. aliases: output -> the input whose memory it shares.
struct EngineFile {
    std::string graph;
    std::string file;
    std::string sha256;
    std::int64_t bytes = 0;
    std::vector<Profile> profiles;
    Ordered<std::string> aliases;
};

// The engines that one `pass-export build` made, in engines/<directory>.
struct EngineSet {
    std::string directory;
    std::string library;
    std::string version;
    std::vector<std::string> targets;
    std::string bundle;
    std::int64_t lookahead = 0;
    std::int64_t max_batch_size = 0;
    Numbers capacities;
    Numbers prefill_widths;
    std::vector<EngineFile> engines;
};

struct Manifest {
    ModelInfo model;
    LookaheadInfo lookahead;
    std::string rule;  // match or rejection
    Graph trunk;
    std::vector<DerivedTrunk> derived;
    std::vector<PlanInfo> plans;
    Graph logprobs;
    std::optional<Graph> processors;  // of constraints, penalties and biases; none in bundles of older versions
    Ordered<FileInfo> files;
    std::vector<EngineSet> engines;

    // A hash over the hashes of graphs and weights. Engines that were built from other ones do not fit.
    std::string content() const;

    // The derived trunk that ONNX Runtime runs on `device` over so many slots; null is the portable one. The same form
    // of the trunk runs all passes of a session, so that a sequence's text does not depend on the batch of a pass.
    // lookahead_rows: false is for passes without look-ahead rows.
    const DerivedTrunk* derived_trunk(const std::string& device, int slots, bool lookahead_rows = true) const;

    // The trees for whose tails `built` is true, which gets a tail's file.
    std::vector<Tree> trees(const std::function<bool(const std::string&)>& built = [](const std::string&) {
        return true;
    }) const;

    // Error if the bundle has no such plan.
    const PlanInfo& plan(const std::string& name) const;

    // Null if the bundle has no such file.
    const FileInfo* file(const std::string& name) const;
};

// Whether `name` is a plain file name, which cannot point outside the bundle's directory.
bool is_file_name(const std::string& name);

// The manifest in `text`. Throws Error with the first field that is missing, unknown or of another kind.
Manifest parse_manifest(const std::string& text);

// Throws Error if what this runtime takes from a manifest would make it read or write memory that is not there, or fill
// tensors that it does not know. What the manifest says twice is not compared: hashes guard the bundle's files, and
// ONNX Runtime's graphs are compared with the manifest when they are opened.
void check_consistency(const Manifest& manifest);

// trunk.onnx states the model that it was exported from: throws Error if `stated`, the JSON in its metadata, is of
// another one.
void check_trunk_metadata(const Manifest& manifest, const std::string& stated);

// Parse and validate `bundle`/pass_config.json. Throws Error with the first problem.
Manifest read_manifest(const std::filesystem::path& bundle);

class HashCache;

// Check that every file of the bundle exists with its size and, with `hashes`, its SHA-256. cache: known hashes, so
// that files that have not changed are not read again; null reads all of them.
void verify_files(const std::filesystem::path& bundle, const Manifest& manifest, bool hashes = true,
                  HashCache* cache = nullptr);

}  // namespace pass
