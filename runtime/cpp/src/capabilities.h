// How engines differ, as data.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan.h"

namespace pass {

// N for a cache of `capacity` columns: a window's last row predicts one past it, and a fused tail looks as far as a
// full group would.
inline std::int64_t listed_positions(std::int64_t capacity) { return capacity + 1 + max_lookahead; }

// What a backend can do.
struct Capabilities {
    std::string device;
    std::int64_t vocab_size = 0;
    std::vector<std::int64_t> capacities;  // KV capacities S in rising order
    std::vector<int> prefill_widths;       // chunk widths Q in falling order, ending in 1
    std::vector<int> batch_sizes;          // slots that a pass may run over, in rising order; the last is all of them
    std::optional<int> lookahead{};        // the only number of drafts that plans may have, with full groups; none: any
    int least_width = 1;                   // narrower windows are padded to it
    std::int64_t listed = 0;  // N, the positions that tails are told the noise of; 0: what the largest capacity wants

    int slots() const { return batch_sizes.back(); }
    std::int64_t max_capacity() const { return capacities.back(); }
    // N, the positions a tail may want noise for.
    std::int64_t positions() const { return listed > 0 ? listed : listed_positions(max_capacity()); }
    // The smallest batch that covers the first `slots` slots.
    int batch_size(int slots) const;
    // The smallest capacity of at least `columns`.
    std::int64_t capacity(std::int64_t columns) const;
    // Cache columns that a window of `width` rows writes.
    int columns(int width) const { return width > least_width ? width : least_width; }
    // Whether there are engines for all of `plans`.
    bool allows(const std::vector<Plan>& plans) const;
    // The plan that verifies `drafts` drafts; it may have room for more.
    Plan verifying(int drafts) const { return verify_plan(lookahead.value_or(drafts)); }
};

// 1, 2, 4, ... up to and including `maximum`.
std::vector<int> batch_sizes_up_to(int maximum);
// 64, 128, ... up to and including `maximum`, an eighth apart at most where they are long: attention on the CPU pays
// for every column, and a capacity that is a multiple of 64 makes sums round alike, however many columns are masked.
std::vector<std::int64_t> following_capacities(std::int64_t maximum);
// 256, 512, ... up to and including `maximum`: every one is captured as CUDA graphs of its own.
std::vector<std::int64_t> doubling_capacities(std::int64_t maximum);

}  // namespace pass
