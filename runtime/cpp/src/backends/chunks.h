// How wide the chunks may be in which a GPU reads prompts.
//
// A chunk reads all weights once, so few wide ones are faster than many narrow ones; a pass of 256 rows leaves a large
// GPU half idle. But a wide one needs memory for what its rows compute, which stays reserved for as long as the engine
// is there.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "bundle/manifest.h"

namespace pass {

// What the rows of a wide chunk may take.
inline constexpr std::int64_t most_chunk_bytes = std::int64_t{1} << 30;

// About the bytes that a chunk of so many rows needs beside weights and cache, over a KV cache of `columns` entries:
// for the logits of one row, a layer's rows (hidden states, and an MLP about four times as wide) and attention's
// scores, as if no kernel were fused.
std::int64_t activation_bytes(const ModelInfo& model, std::int64_t rows, std::int64_t columns);

// The widths of wide chunks (2048 and 1024) that fit a KV cache of one of the `capacities`, which rise, each with the
// largest one at which its rows take no more than `most_chunk_bytes`.
std::map<int, std::int64_t> wide_chunks(const ModelInfo& model, const std::vector<std::int64_t>& capacities);

}  // namespace pass
