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

// N, the number of positions that noise inputs list, for a KV capacity in tokens. Beyond the
// capacity, 1 is for the token that the last row of a window predicts, and max_lookahead for the
// rows of a fused tail's look-ahead group.
inline std::int64_t listed_positions(std::int64_t capacity) { return capacity + 1 + max_lookahead; }

// What a backend can do. Callers look here for how backends differ.
struct Capabilities {
    std::string device;
    std::int64_t vocab_size = 0;
    // KV capacities in tokens that passes may have, in rising order
    std::vector<std::int64_t> capacities;
    std::vector<int> prefill_widths;  // rows of prompt chunks in falling order, ending in 1
    // slots that a pass may run over, in rising order; the last is all slots
    std::vector<int> batch_sizes;
    // The length of the draft chain and of the look-ahead groups that the engines were built for;
    // none allows any plan.
    std::optional<int> fixed_lookahead{};
    std::vector<Tree> trees{};        // that the bundle has tails for
    bool rounds_activations = false;  // whether activations are rounded to 8 bits
    // Whether the bits of a token's K/V are the same whichever prompt chunk or chain writes them.
    // Of a tree's drafts, this is sure only for the chain of first choices.
    bool same_entries = false;
    // whether passes run as CUDA graphs that stay valid when the KV capacity changes
    bool keeps_graphs = false;
    int least_width = 1;     // narrower windows are padded to this many rows
    bool exact_sums = true;  // whether 8-bit products are summed exactly, as integers
    // A pass of the trunk over fewer rows, those of all slots together, is padded to this many. The
    // padding is no part of the window: tails do not see it.
    int least_rows = 1;
    // N that the engines were built for; 0 is that of the largest capacity
    std::int64_t engine_positions = 0;
    // Width of a wide chunk -> the largest KV capacity with which it may run, because it needs much
    // memory.
    std::map<int, std::int64_t> chunk_capacities{};

    int slots() const { return batch_sizes.back(); }
    std::int64_t max_capacity() const { return capacities.back(); }
    // N, the number of positions that the tails' noise inputs list.
    std::int64_t noise_positions() const {
        return engine_positions > 0 ? engine_positions : listed_positions(max_capacity());
    }
    // The trees that may run: none if activations are rounded to 8 bits. The last bits of a row's
    // values depend on its place in the window, and decide what is rounded up. A tree's accepted
    // drafts may be in other rows than in plain decoding, which could change the text, also of
    // other sequences in the batch.
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
    // capacity: the present KV capacity in tokens, which grows if a chunk needs more.
    std::vector<int> chunks(std::int64_t start, std::int64_t capacity) const;
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
// Capacities that follow a text closely: 64, 128, ... up to and including `maximum`, in steps of
// 64, or of at most an eighth of the size before. Attention on the CPU takes time for every entry
// of the cache, valid or not. With multiples of 64 its sums over the entries round alike, however
// many of them are masked.
std::vector<std::int64_t> following_capacities(std::int64_t maximum);
// 256, 512, ... up to and including `maximum`. They are few, because each needs its own CUDA
// graphs.
std::vector<std::int64_t> doubling_capacities(std::int64_t maximum);

// The memory that the activations of a wide chunk may take.
inline constexpr std::int64_t max_chunk_bytes = std::int64_t{1} << 30;

// Estimates the bytes that a chunk needs beside weights and cache: for the logits of one row, a
// layer's hidden states, its MLP (about four times as wide) and attention's scores over `columns`
// cache entries, as if no kernel were fused.
std::int64_t activation_bytes(const ModelInfo& model, std::int64_t rows, std::int64_t columns);

// Width of a wide prompt chunk (2048, 1024 rows) -> the largest of the KV `capacities` (tokens, in
// rising order) at which it fits the cache and takes at most `max_chunk_bytes`. Widths that fit at
// none are left out. A 256-row chunk leaves a large GPU half idle, but the memory for a wide one's
// activations stays reserved while the engine is open.
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
