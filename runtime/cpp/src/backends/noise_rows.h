// The noise input of tails: for every slot and position, offsets into the bundle's table of random numbers.
//
// A slot's row has an entry for every position of the longest text. Entries are written in blocks, when a pass may read
// beyond those that are there, so that starting a request takes no longer with a larger KV capacity.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "backends/buffers.h"

namespace pass {

class NoiseRows {
   public:
    // positions: the length of a row. streams: how many of `noise_streams` the bundle's tails read.
    NoiseRows(Buffers& buffers, std::size_t streams, int slots, std::int64_t positions)
        : buffers_(buffers), streams_(streams), positions_(positions), rows_(static_cast<std::size_t>(slots)) {}

    // A new request is in `slot`, with this seed; none where it samples greedily and needs no noise.
    void begin(int slot, std::optional<std::uint64_t> seed);
    // Make sure that the row of `slot` is filled for the positions from `first` up to, without, `stop`.
    void cover(int slot, std::int64_t first, std::int64_t stop);

   private:
    struct Row {
        std::optional<std::uint64_t> seed;
        std::int64_t first = 0, stop = 0;  // the filled positions, without `stop`
    };

    Buffers& buffers_;
    std::size_t streams_;
    std::int64_t positions_;
    std::vector<Row> rows_;
};

}  // namespace pass
