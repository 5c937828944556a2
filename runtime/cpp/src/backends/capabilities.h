// What a backend can do, and the names of devices.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bundle/manifest.h"
#include "bundle/window.h"

namespace pass {

// How many positions noise inputs list for so many cache entries: one more for the token after the
// last, and max_lookahead for the look-ahead group after that.
inline std::int64_t listed_positions(std::int64_t entries) { return entries + 1 + max_lookahead; }

struct Capabilities {
    std::string device;  // "cpu", "cuda", or the engines' library and its version
    std::int64_t vocab_size = 0;
    std::vector<std::int64_t> capacities;  // KV capacities in tokens, rising
    std::vector<int> prefill_widths;       // rows of prompt chunks, falling, ending in 1
    std::vector<int> batch_sizes;          // over how many slots passes run, rising, up to all
    // The only length of chains and look-ahead groups that engines run; none allows any window.
    std::optional<int> fixed_lookahead{};
    // Whether all prompt chunks and windows write the same bits of K/V for a token.
    bool same_entries = false;
    // Whether passes run as captured CUDA graphs that stay valid when the KV capacity changes.
    bool keeps_graphs = false;
    int least_width = 1;  // narrower windows are padded to this many rows
    // The `noise_positions` that engines were built for; 0: those of the largest capacity.
    std::int64_t engine_positions = 0;
    // Width of a wide chunk, which needs much memory -> the largest KV capacity it may run with.
    std::map<int, std::int64_t> chunk_capacities{};
    // Windows for n-gram drafts, by rising numbers of drafts.
    std::vector<Window> verifying{};

    int slots() const { return batch_sizes.back(); }
    std::int64_t max_capacity() const { return capacities.back(); }
    // N, how many positions the tails' noise inputs list.
    std::int64_t noise_positions() const {
        return engine_positions > 0 ? engine_positions : listed_positions(max_capacity());
    }
    // The smallest that covers the first `slots` slots.
    int batch_size(int slots) const;
    // The smallest of at least `tokens`. Throws std::logic_error if there is none.
    std::int64_t capacity(std::int64_t tokens) const;
    int padded_width(int width) const { return width > least_width ? width : least_width; }
    // The widths of the chunks that may follow `start` tokens of a prompt, falling. present: the KV
    // capacity, which grows if a chunk needs more.
    std::vector<int> chunks(std::int64_t start, std::int64_t present) const;
    // Of `ar`, `two-pass` and `fused` with `lookahead` drafts, those that the backend can run, and
    // the windows for more copied drafts.
    std::vector<Window> plan_windows(int lookahead) const;
    bool allows(const std::vector<Window>& windows) const;
};

// The bundle's windows that only verify, with at least `fewest` drafts.
std::vector<Window> verifying_windows(const Manifest& manifest, int fewest = 1);

// 1, 2, 4, ... up to and including `maximum`.
std::vector<int> batch_sizes_up_to(int maximum);
// For CPUs, where the portable trunk takes time for every entry: multiples of 64 up to and
// including `maximum`, each at most an eighth or 64 larger than the one before. (Over a multiple of
// 64 entries, sums round alike however many are masked.)
std::vector<std::int64_t> stepped_capacities(std::int64_t maximum);
// For GPUs: 256, 512, ... up to `maximum`. Few, as each needs its own CUDA graphs.
std::vector<std::int64_t> doubling_capacities(std::int64_t maximum);

// The memory that the activations of a wide chunk may take.
inline constexpr std::int64_t max_chunk_bytes = std::int64_t{1} << 30;

// An estimate of what a chunk needs beside weights and cache: the logits of one row, and a layer's
// hidden states, MLP and attention scores over `columns` entries, as if no kernel were fused.
std::int64_t activation_bytes(const ModelInfo& model, std::int64_t rows, std::int64_t columns);

// For 2048 and 1024 rows, the largest of the `capacities` (rising) with which such a chunk fits the
// cache and `max_chunk_bytes`; none if it fits none.
std::map<int, std::int64_t> wide_chunks(const ModelInfo& model,
                                        const std::vector<std::int64_t>& capacities);

// Of `cuda:1`. ordinal: the GPU's number among those that the process sees.
struct DeviceName {
    std::string kind;
    int ordinal = 0;
};

std::string comma_list(const std::vector<std::string>& items);

// Throws Error if there is no such device, or its number is wrong.
DeviceName split_device(const std::string& name);

}  // namespace pass
