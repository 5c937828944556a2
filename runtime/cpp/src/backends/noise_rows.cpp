#include "backends/noise_rows.h"

#include <algorithm>

#include "bundle/noise.h"

namespace pass {

namespace {

constexpr std::int64_t block = 256;  // how many positions are filled beyond those that are needed

}  // namespace

void NoiseRows::begin(int slot, std::optional<std::uint64_t> seed) {
    rows_[static_cast<std::size_t>(slot)] = {seed, 0, 0};
}

void NoiseRows::cover(int slot, std::int64_t first, std::int64_t stop) {
    Row& row = rows_[static_cast<std::size_t>(slot)];
    stop = std::min(stop, positions_);
    if (!row.seed || (row.first <= first && stop <= row.stop)) return;
    row.first = row.stop = 0;  // until every stream is written
    stop = std::min(stop + block, positions_);
    std::vector<std::int64_t> offsets(static_cast<std::size_t>(2 * (stop - first)));
    for (std::size_t stream = 0; stream < streams_; ++stream) {
        noise_offsets(*row.seed, static_cast<std::uint32_t>(stream), first, offsets);
        buffers_.write_part(noise_streams[stream], slot, {positions_, 2}, first, offsets);
    }
    row.first = first;
    row.stop = stop;
}

}  // namespace pass
