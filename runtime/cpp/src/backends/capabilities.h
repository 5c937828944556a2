// What a backend can do; the names of devices.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bundle/manifest.h"
#include "bundle/plan.h"

namespace pass {

// K, how many of the most likely tokens the graph of log-probabilities reports.
inline constexpr std::int64_t max_logprobs = 20;

// N, the number of positions that noise inputs list for a KV capacity in tokens: 1 more for the
// token that a window's last row predicts, and max_lookahead more for a look-ahead group after it.
inline std::int64_t listed_positions(std::int64_t capacity) { return capacity + 1 + max_lookahead; }

// What a backend can do. Callers look here for how backends differ.
struct Capabilities {
    std::string device;
    std::int64_t vocab_size = 0;
    std::vector<std::int64_t> capacities;  // possible KV capacities in tokens, rising
    std::vector<int> prefill_widths;       // rows of prompt chunks, falling, ending in 1
    std::vector<int> batch_sizes;          // slots of a pass, rising; the last is all slots
    // The length of draft chain and groups that the engines were built for; none allows any plan.
    std::optional<int> fixed_lookahead{};
    std::vector<Tree> trees{};        // the trees that have tails
    bool rounds_activations = false;  // whether activations are rounded to 8 bits
    // Whether all prompt chunks and chains, and first choices of trees, write the same K/V bits.
    bool same_entries = false;
    bool keeps_graphs = false;  // whether CUDA graphs stay valid when the KV capacity changes
    int least_width = 1;        // narrower windows are padded to this many rows
    bool exact_sums = true;     // whether 8-bit products are summed exactly, as integers
    // The fewest rows of the trunk, of all slots together. The padding of fewer rows is no part of
    // a window: tails do not see it.
    int least_rows = 1;
    std::int64_t engine_positions = 0;  // N of the engines; 0: that of the largest capacity
    // Width of a wide chunk -> the largest KV capacity at which there is memory for it.
    std::map<int, std::int64_t> chunk_capacities{};

    int slots() const { return batch_sizes.back(); }
    std::int64_t max_capacity() const { return capacities.back(); }
    // N, the number of positions that the tails' noise inputs list.
    std::int64_t noise_positions() const {
        return engine_positions > 0 ? engine_positions : listed_positions(max_capacity());
    }
    // The trees that may run: none if activations are rounded to 8 bits. The last bits of a row's
    // values depend on the row's index in the window, and decide what is rounded up. A tree's
    // accepted drafts are in other rows than in plain decoding, which could change the text, also
    // of other sequences in the batch.
    std::vector<Tree> exact_trees() const {
        return rounds_activations ? std::vector<Tree>{} : trees;
    }
    // The smallest batch that covers the first `slots` slots.
    int batch_size(int slots) const;
    // The smallest KV capacity of at least `tokens`. Throws std::logic_error if there is none.
    std::int64_t capacity(std::int64_t tokens) const;
    // The rows of a padded window of `width` rows. Each row writes one cache entry.
    int padded_width(int width) const { return width > least_width ? width : least_width; }
    // The widths of the chunks that may follow `start` tokens of a prompt, in falling order.
    // present: the KV capacity in tokens, which grows if a chunk needs more.
    std::vector<int> chunks(std::int64_t start, std::int64_t present) const;
    // The plans of `ar`, `two-pass` and `fused` with `lookahead` drafts that the backend can run.
    std::vector<Plan> mode_plans(int lookahead) const;
    // Whether the backend can run all of `plans`.
    bool allows(const std::vector<Plan>& plans) const;
    // A plan with at least `drafts` draft rows and no look-ahead rows.
    Plan verify_plan(int drafts) const {
        return pass::verify_plan(fixed_lookahead.value_or(drafts));
    }
};

// 1, 2, 4, ... up to and including `maximum`.
std::vector<int> batch_sizes_up_to(int maximum);
// Capacities that follow a text's length closely, for CPUs, where attention takes time for every
// cache entry, valid or not: multiples of 64 up to and including `maximum`, each at most an eighth
// or 64 larger than the one before. With multiples of 64, sums over the entries round alike however
// many entries are masked.
std::vector<std::int64_t> stepped_capacities(std::int64_t maximum);
// 256, 512, ... up to and including `maximum`: few, because each needs its own CUDA graphs.
std::vector<std::int64_t> doubling_capacities(std::int64_t maximum);

// The memory that the activations of a wide chunk may take.
inline constexpr std::int64_t max_chunk_bytes = std::int64_t{1} << 30;

// The estimated bytes that a chunk needs beside weights and cache: for the logits of one row, and a
// layer's hidden states, MLP (about four times as wide) and attention scores over `columns` cache
// entries, as if no kernel were fused.
std::int64_t activation_bytes(const ModelInfo& model, std::int64_t rows, std::int64_t columns);

// Width of a wide prompt chunk (2048, 1024 rows) -> the largest of the KV `capacities` (tokens, in
// rising order) at which it fits the cache and takes at most `max_chunk_bytes`. Widths that fit at
// none are left out. A chunk of 256 rows leaves a large GPU half idle, but the memory for a wider
// chunk's activations stays reserved while the engine is open.
std::map<int, std::int64_t> wide_chunks(const ModelInfo& model,
                                        const std::vector<std::int64_t>& capacities);

// A device, and which of several GPUs: `cuda:1` is `cuda` on GPU 1, `cuda` is on GPU 0.
struct DeviceName {
    std::string kind;  // the name without the number
    int ordinal = 0;   // the number of the GPU among those that this process sees
};

// "a, b, c".
std::string comma_list(const std::vector<std::string>& items);

// Throws Error if `name` is not a device, or its number is wrong or not allowed.
DeviceName split_device(const std::string& name);

}  // namespace pass
