#include "catch.hpp"

#include <optional>
#include <utility>
#include <vector>

#include "backends/capabilities.h"
#include "decode/engine.h"

using namespace pass;

TEST_CASE("prompts are prefilled in the engine's chunk widths", "[prompt]") {
    using Chunk = std::pair<std::int64_t, int>;  // tokens, and the rows of the window
    const auto chunk = [](const Capabilities& sizes, std::int64_t cached, std::int64_t remaining,
                          std::optional<std::int64_t> max_rows = std::nullopt) {
        const PromptChunk result =
            next_chunk(sizes, cached, remaining, sizes.capacity(cached), max_rows);
        return Chunk(result.tokens, result.width);
    };
    Capabilities sizes{"cpu", 50, stepped_capacities(256), {64, 16, 1}, {1}};
    CHECK(chunk(sizes, 0, 100) == Chunk(64, 64));
    CHECK(chunk(sizes, 64, 36) == Chunk(16, 16));
    CHECK(chunk(sizes, 0, 48) == Chunk(48, 64));  // three quarters of the window are filled
    CHECK(chunk(sizes, 0, 3) == Chunk(3, 16));    // in place of three windows of one row
    CHECK(chunk(sizes, 0, 100, 16) == Chunk(16, 16));
    CHECK(chunk(sizes, 250, 5) == Chunk(1, 1));  // a wider chunk does not fit the cache
    sizes.prefill_widths = {32, 1};
    CHECK(chunk(sizes, 0, 100) == Chunk(32, 32));
    CHECK(chunk(sizes, 0, 20) == Chunk(20, 32));
    CHECK(chunk(sizes, 0, 100, 16) == Chunk(1, 1));
    sizes.prefill_widths = {1};
    CHECK(chunk(sizes, 0, 100) == Chunk(1, 1));
    sizes.least_width = 8;
    sizes.prefill_widths = {10, 1};
    CHECK(chunk(sizes, 246, 9) == Chunk(9, 10));
    CHECK(chunk(sizes, 247, 9) == Chunk(1, 1));
}

TEST_CASE("a GPU has wide chunks for prompts where there is memory for them", "[prompt]") {
    // As tests/runtime/test_wide_chunks.py: a model of 7B in fp16 and in fp32, and one of 135M.
    using Chunks = std::map<int, std::int64_t>;
    const auto model = [](const char* dtype, std::int64_t hidden_size, std::int64_t heads) {
        ModelInfo result;
        result.dtype = dtype;
        result.hidden_size = hidden_size;
        result.heads = heads;
        result.vocab_size = 32000;
        return result;
    };
    const std::vector<std::int64_t> capacities = doubling_capacities(32768);
    const ModelInfo large = model("float16", 4096, 32), small = model("float16", 576, 9);
    CHECK(wide_chunks(large, capacities) == Chunks{{2048, 2048}, {1024, 8192}});
    CHECK(wide_chunks(model("float32", 4096, 32), capacities) == Chunks{{1024, 4096}});
    CHECK(wide_chunks(small, capacities) == Chunks{{2048, 16384}, {1024, 32768}});
    CHECK(wide_chunks(small, {256, 512, 1000}).empty());
    CHECK(activation_bytes(large, 2048, 2048) <= max_chunk_bytes);
    CHECK(activation_bytes(large, 2048, 4096) > max_chunk_bytes);
}

TEST_CASE("wide chunks are used while the cache is small enough for them", "[prompt]") {
    Capabilities sizes{
        "cuda", 320, {256, 512, 1024, 2048, 4096, 8192}, {2048, 1024, 256, 64, 16, 1}, {1}};
    sizes.chunk_capacities = {{2048, 4096}, {1024, 8192}};
    // The widths of the chunks of a prompt, while the cache grows from `capacity`.
    const auto widths = [&](std::int64_t capacity, std::int64_t tokens,
                            std::optional<std::int64_t> max_rows = std::nullopt) {
        std::vector<int> result;
        for (std::int64_t start = 0; start < tokens;) {
            const auto [count, width] =
                next_chunk(sizes, start, tokens - start, capacity, max_rows);
            capacity = std::max(capacity, sizes.capacity(start + width));
            result.push_back(width);
            start += count;
        }
        return result;
    };
    using Widths = std::vector<int>;
    CHECK(widths(256, 720) == Widths{256, 256, 256});
    CHECK(widths(256, 768) == Widths{1024});
    CHECK(widths(256, 1536) == Widths{2048});
    CHECK(widths(256, 4000) == Widths{2048, 2048});
    // Over more than 4096 entries there is no memory for 2048 rows.
    CHECK(widths(256, 6000) == Widths{2048, 2048, 1024, 1024});
    CHECK(widths(8192, 2048) == Widths{1024, 1024});
    CHECK(widths(256, 3000, 64) == Widths(47, 64));  // beside others that decode
}
