// pass_config.json: the contract between exporter, runtimes and servers (docs/bundle.md). As
// pass_runtime.bundle.manifest.
#pragma once

#include <cstdint>
#include <filesystem>
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
inline constexpr const char* chat_template_file = "chat_template.jinja";
inline constexpr const char* engines_directory = "engines";
inline constexpr int manifest_version = 3;

// A mapping in the order of the file.
template <class Value>
using Ordered = std::vector<std::pair<std::string, Value>>;

using Numbers = std::vector<std::int64_t>;

// A dimension is a number, or a name where it is symbolic: batch, width, logit_rows, lookahead_rows, capacity,
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

    // An input or output by its name; null where there is none.
    const Tensor* find(const std::string& name) const;
};

// The trunk rewritten for the engine of one device: other nodes, same tensors, same file of weights.
struct DerivedTrunk {
    std::string file;
    std::string device;
};

// The quantization scheme of a weight: its values are code * scale, or (code - zero point) * scale. offset_columns: the
// weight has extra columns with offsets. (The manifest's names are `grid`, `numbers` and `offsets`.)
struct SchemeInfo {
    std::string codes;
    std::optional<std::int64_t> block_size;
    bool zero_points = false;
    bool offset_columns = false;
};

struct QuantizationInfo {
    SchemeInfo scheme;
    std::optional<SchemeInfo> lm_head;
    Ordered<SchemeInfo> layers;
    std::optional<std::string> calibration;
    std::string activations = "full";
    std::vector<std::string> weight_only;
};

struct ModelInfo {
    std::string name;
    std::string source;
    std::string family;
    std::string dtype;
    std::string weights;
    std::optional<QuantizationInfo> quantization;
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

struct HeadInfo {
    std::int64_t rank = 0;
    std::int64_t width = 0;
    std::int64_t blocks = 0;
};

struct LookaheadInfo {
    std::int64_t length = 0;
    bool trained = false;
    std::string source;
    std::int64_t adapter_rank = 0;
    std::vector<double> acceptance_per_position;
    std::vector<double> acceptance_per_position_sampled;
    std::optional<HeadInfo> head;

    // Whether the trunk must know which of a window's rows are look-ahead rows.
    bool reads_rows() const { return adapter_rank > 0 || head.has_value(); }
};

// The constants of a plan as the manifest lists them; window_mask has a string of 0 and 1 for every row.
struct ListedConstants {
    Numbers row_position;
    std::vector<std::string> window_mask;
    Numbers logit_rows;
    Numbers lookahead_rows;
    std::vector<Numbers> draft_rows;
    Numbers lookahead_ids;
};

struct PlanInfo {
    std::string name;
    std::int64_t drafts = 0;
    Numbers groups;
    std::string next;
    ListedConstants listed;
    PlanConstants constants;  // the same in the form that graphs take
    Ordered<Graph> tails;     // by sampler: greedy, sample, truncated

    // Null where the plan has no tail for `sampler`.
    const Graph* tail(const std::string& sampler) const;
};

struct NoiseInfo {
    std::string scheme;
    std::int64_t block_size = 0;
    std::int64_t row = 0;
    std::int64_t bits = 0;
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
    Ordered<std::string> feeds;  // output -> the input of the next graph or pass whose memory it is
    NoiseInfo noise;
    Ordered<FileInfo> files;
    Ordered<std::string> tools;
    std::vector<EngineSet> engines;

    // A hash over the hashes of graphs and weights. Engines that were built from other ones do not fit.
    std::string content() const;

    // The trunk to run on `device` with ONNX Runtime: the one derived for it, else the portable one.
    std::string trunk_file(const std::string& device) const;

    // Error where the bundle has no such plan.
    const PlanInfo& plan(const std::string& name) const;

    // The input that `output` feeds; null where it feeds none.
    const std::string* fed(const std::string& output) const;

    // Null where the bundle has no such file.
    const FileInfo* file(const std::string& name) const;
};

// Parse and validate `bundle`/pass_config.json. Throws Error with the first problem.
Manifest read_manifest(const std::filesystem::path& bundle);

class Remembered;

// Check that every file of the bundle exists with its size and, with `hashes`, its SHA-256. remembered: known hashes,
// so that files that have not changed are not read again; null reads all of them.
void verify_files(const std::filesystem::path& bundle, const Manifest& manifest, bool hashes = true,
                  Remembered* remembered = nullptr);

// What the metadata of trunk.onnx must hold under "pass_toolkit", as a JSON object.
Ordered<std::variant<std::int64_t, std::string>> trunk_metadata(const Manifest& manifest);

}  // namespace pass
