// How engines differ, as data; the names of devices.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bundle/manifest.h"
#include "bundle/plan.h"

namespace pass {

// N, the positions that a slot may need random numbers for, with a KV capacity of `capacity` tokens: the last row of a
// window predicts the position after it, and a fused tail reads as far as a full group would reach.
inline std::int64_t listed_positions(std::int64_t capacity) { return capacity + 1 + max_lookahead; }

// What a backend can do.
struct Capabilities {
    std::string device;
    std::int64_t vocab_size = 0;
    std::vector<std::int64_t> capacities;  // KV capacities S in rising order
    std::vector<int> prefill_widths;       // chunk widths Q in falling order, ending in 1
    std::vector<int> batch_sizes;          // of passes, in rising order; the last is the number of slots
    std::optional<int> lookahead{};        // the only number of drafts that plans may have, in full groups; none: any
    std::vector<Tree> trees{};             // that there are tails for
    bool rounds_activations = false;       // to 8 bits
    bool same_entries = false;             // a token's K/V are the same bits whatever window wrote them, a chunk of a
                                           // prompt or a chain; a tree's second choices are excepted
    bool keeps_graphs = false;             // passes are repeated as captured graphs, at every KV capacity
    int least_width = 1;                   // narrower windows are padded to it
    std::int64_t listed = 0;  // N, the positions in the noise input of tails; 0: as many as max_capacity() needs
    // Of wide chunks, the largest KV capacity with which they are run, because of the memory that they need.
    std::map<int, std::int64_t> chunk_capacities{};

    int slots() const { return batch_sizes.back(); }
    std::int64_t max_capacity() const { return capacities.back(); }
    // N, the positions that tails may read random numbers for.
    std::int64_t positions() const { return listed > 0 ? listed : listed_positions(max_capacity()); }
    // The trees that may run: none if activations are rounded. The last bits of a row
    // depend on its place in the window, and would decide what is rounded up: a tree, whose accepted drafts may stand
    // elsewhere than in plain decoding, could write another text, for neighbours in the batch too.
    std::vector<Tree> exact_trees() const { return rounds_activations ? std::vector<Tree>{} : trees; }
    // The smallest batch that covers the first `slots` slots.
    int batch_size(int slots) const;
    // The smallest KV capacity of at least `tokens`.
    std::int64_t capacity(std::int64_t tokens) const;
    // Tokens that a window of `width` rows writes into the KV cache, with its padding.
    int padded_width(int width) const { return width > least_width ? width : least_width; }
    // The widths of the chunks that may follow `start` tokens of a prompt, in falling order. capacity: the KV capacity
    // as it is now; it grows if a chunk needs that.
    std::vector<int> chunks(std::int64_t start, std::int64_t capacity) const;
    // The plans of the modes without trees, for `lookahead` drafts, that there are engines for.
    std::vector<Plan> mode_plans(int lookahead) const;
    // Whether there are engines for all of `plans`.
    bool allows(const std::vector<Plan>& plans) const;
    // The plan that verifies `drafts` drafts. It may have rows for more of them.
    Plan verify_plan(int drafts) const { return pass::verify_plan(lookahead.value_or(drafts)); }
};

// 1, 2, 4, ... up to and including `maximum`.
std::vector<int> batch_sizes_up_to(int maximum);
// 64, 128, ... up to and including `maximum`, in steps of at most an eighth: attention on the CPU takes time for every
// token of the capacity. Multiples of 64 make its sums round alike, however many tokens are masked.
std::vector<std::int64_t> following_capacities(std::int64_t maximum);
// 256, 512, ... up to and including `maximum`: few, since each needs CUDA graphs of its own.
std::vector<std::int64_t> doubling_capacities(std::int64_t maximum);

// What the rows of a wide chunk may take.
inline constexpr std::int64_t max_chunk_bytes = std::int64_t{1} << 30;

// How wide the chunks may be in which a GPU reads prompts: a chunk reads all weights once, so few wide ones are faster
// than many narrow ones, and a pass of 256 rows leaves a large GPU half idle. But a wide one needs memory for what its
// rows compute, which stays reserved for as long as the engine is there.
//
// About the bytes that a chunk of so many rows needs beside weights and cache, over a KV cache of `columns` entries:
// for the logits of one row, a layer's rows (hidden states, and an MLP about four times as wide) and attention's
// scores, as if no kernel were fused.
std::int64_t activation_bytes(const ModelInfo& model, std::int64_t rows, std::int64_t columns);

// The widths of wide chunks (2048 and 1024) that fit a KV cache of one of the `capacities`, which rise, each with the
// largest one at which its rows take no more than `max_chunk_bytes`.
std::map<int, std::int64_t> wide_chunks(const ModelInfo& model, const std::vector<std::int64_t>& capacities);

// A device, and which of several GPUs: `cuda:1` is `cuda` on GPU 1, `cuda` is on GPU 0.
struct DeviceName {
    std::string kind;  // the name without a number, or auto
    int ordinal = 0;   // the number of the GPU among those that this process sees
};

// Throws Error if `name` is no device, or has a number that is none or that its device does not take.
DeviceName split_device(const std::string& name);

}  // namespace pass
