// What a backend can do, by which callers see how backends differ; and the names of devices.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bundle/manifest.h"
#include "bundle/plan.h"

namespace pass {

// K, how many of the likeliest tokens the graph of log-probabilities reports.
inline constexpr std::int64_t max_logprobs = 20;

// N, how many positions noise inputs list for a cache of so many entries: one more for the token
// after the last, and max_lookahead more for the look-ahead group after that in a fused window.
inline std::int64_t listed_positions(std::int64_t entries) { return entries + 1 + max_lookahead; }

struct Capabilities {
    std::string device;  // "cpu", "cuda", or the engines' library and its version
    std::int64_t vocab_size = 0;
    std::vector<std::int64_t> capacities;  // KV capacities in tokens that passes may have, rising
    std::vector<int> prefill_widths;       // rows of prompt chunks, falling, ending in 1
    std::vector<int> batch_sizes;          // over how many slots passes run, rising, up to all
    // The number of drafts of every chain, and of rows of its look-ahead groups, if engines run no
    // other number; none allows any plan.
    std::optional<int> fixed_lookahead{};
    std::vector<Tree> trees{};        // the trees that there are tails for
    bool rounds_activations = false;  // whether activations are rounded to 8 bits
    // Whether all prompt chunks and chains write the same bits of K/V for a token. In a tree, only
    // the chain of first choices is sure to write these bits too.
    bool same_entries = false;
    // Whether passes run as captured CUDA graphs that stay valid when the KV capacity changes.
    bool keeps_graphs = false;
    int least_width = 1;  // narrower windows are padded to this many rows
    // The `noise_positions` that engines were built for; 0: compute it from the largest capacity.
    std::int64_t engine_positions = 0;
    // Width of a wide chunk, which needs much memory -> the largest KV capacity it may run with.
    std::map<int, std::int64_t> chunk_capacities{};

    int slots() const { return batch_sizes.back(); }
    std::int64_t max_capacity() const { return capacities.back(); }
    // N, the number of positions that the tails' noise inputs list.
    std::int64_t noise_positions() const {
        return engine_positions > 0 ? engine_positions : listed_positions(max_capacity());
    }
    // `trees`, or none if activations are rounded to 8 bits: a tree's accepted drafts may be in
    // other rows than in plain decoding, and the row changes the last bits of a value, so it may be
    // rounded to another code. That could change the text, also of other sequences in the batch.
    std::vector<Tree> exact_trees() const {
        return rounds_activations ? std::vector<Tree>{} : trees;
    }
    // The smallest batch that covers the first `slots` slots.
    int batch_size(int slots) const;
    // The smallest KV capacity of at least `tokens`. Throws std::logic_error if there is none.
    std::int64_t capacity(std::int64_t tokens) const;
    // The rows of a window of `width` rows and its padding. Each of them writes one cache entry.
    int padded_width(int width) const { return width > least_width ? width : least_width; }
    // The widths of the chunks that may follow `start` tokens of a prompt, in falling order.
    // present: the KV capacity in tokens, which grows if a chunk needs more.
    std::vector<int> chunks(std::int64_t start, std::int64_t present) const;
    // The plans of `ar`, `two-pass` and `fused` with `lookahead` drafts that the backend can run.
    std::vector<Plan> mode_plans(int lookahead) const;
    // Whether the backend can run all of `plans`.
    bool allows(const std::vector<Plan>& plans) const;
    // A plan that verifies `drafts` drafts. It may have more draft rows.
    Plan verify_plan(int drafts) const {
        return pass::verify_plan(fixed_lookahead.value_or(drafts));
    }
};

// 1, 2, 4, ... up to and including `maximum`.
std::vector<int> batch_sizes_up_to(int maximum);
// KV capacities for CPUs, where the portable trunk takes time for every entry, valid or not, so
// that the capacity must follow a text's length closely: multiples of 64 up to and including
// `maximum`, each at most an eighth or 64 larger than the one before. (Over a multiple of 64
// entries, sums round alike however many of the entries are masked.)
std::vector<std::int64_t> stepped_capacities(std::int64_t maximum);
// KV capacities for GPUs: 256, 512, ... up to `maximum`. Few, as each needs its own CUDA graphs.
std::vector<std::int64_t> doubling_capacities(std::int64_t maximum);

// The memory that the activations of a wide chunk may take.
inline constexpr std::int64_t max_chunk_bytes = std::int64_t{1} << 30;

// An estimate of the bytes that a chunk of `rows` rows needs beside weights and cache: for the
// logits of one row, and a layer's hidden states, its MLP (about four times as wide) and
// attention's scores over `columns` cache entries, as if no kernel were fused.
std::int64_t activation_bytes(const ModelInfo& model, std::int64_t rows, std::int64_t columns);

// For each width of wide prompt chunks (2048 and 1024 rows), the largest of the KV `capacities`
// (tokens, rising) with which such a chunk fits the cache and takes at most `max_chunk_bytes`.
// Widths that fit none are left out. A chunk of 256 rows leaves a large GPU half idle, but the
// memory for a wide chunk's activations stays reserved as long as the engine is open.
std::map<int, std::int64_t> wide_chunks(const ModelInfo& model,
                                        const std::vector<std::int64_t>& capacities);

// The name of a device, such as `cuda:1`, in its parts: `cuda` and 1.
struct DeviceName {
    std::string kind;
    int ordinal = 0;  // the number of the GPU among those that this process sees; by default 0
};

// The items with commas between them: "a, b, c".
std::string comma_list(const std::vector<std::string>& items);

// The parts of `name`. Throws Error if there is no such device, or its number is wrong.
DeviceName split_device(const std::string& name);

}  // namespace pass
