// For a seed and a position, two offsets into the tables of random numbers that the tails contain.
// pass_runtime/bundle/noise.py explains why.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

namespace pass {

using Words4 = std::array<std::uint32_t, 4>;
using Words2 = std::array<std::uint32_t, 2>;

// Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
Words4 philox4x32(Words4 counter, Words2 key);

// The tails' inputs, each with random numbers of its own. Under the exact-match rule, tails have
// the first alone.
inline const std::array<std::string, 3> noise_streams{"noise_offsets", "accept_offsets",
                                                      "draft_offsets"};

inline constexpr const char* noise_scheme = "block-race-1";  // how the tails use the tables
inline constexpr int noise_block_size = 8;                   // token ids in a block
inline constexpr int noise_row_entries = 16;                 // entries in a row of a table
inline constexpr int noise_bits = 30;                        // random bits in an entry

// offsets [N,2]: filled for noise_streams[stream] and the N positions from `first` on.
void noise_offsets(std::uint64_t seed, std::uint32_t stream, std::int64_t first,
                   std::span<std::int64_t> offsets);

}  // namespace pass
