// Copies of the K/V that slots give up, for later prompts that begin with the same tokens.
//
// A slot loses its K/V to the next sequence, or when the KV cache shrinks for a short request. They
// are copied here first, so that a long prompt that many requests begin with need not be read
// again. The copies used least recently make room for others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backends/kv_cache.h"
#include "backends/memory.h"

namespace pass {

// The length in tokens of the longest prefix that two sequences have in common.
std::int64_t common_prefix(std::span<const std::int64_t> a, std::span<const std::int64_t> b);

// Prefixes are shared in blocks of this many tokens. The time of a prefill tells a client whether
// another prompt began alike. With blocks, it has to guess a whole block, not token by token.
constexpr std::int64_t block_tokens = 16;
// `count` tokens, rounded down to whole blocks.
constexpr std::int64_t rounded_to_blocks(std::int64_t count) {
    return count - count % block_tokens;
}

// Copies of K/V, the one used last at the end, for one thread at a time. `memory` frees the copies
// that are left when it is destroyed.
class PrefixStore {
   public:
    static constexpr std::size_t max_saved_bytes = std::size_t{512} << 20;  // of all copies
    static constexpr std::size_t max_saved_prefixes = 64;  // a prompt is compared with each
    static constexpr std::size_t min_saved_tokens = 32;    // fewer cost only a pass or two

    // The copy with the longest prefix in common with some tokens, and that prefix's length (or 0).
    struct Match {
        std::size_t index = 0;
        std::int64_t count = 0;
    };

    PrefixStore(KVCache& cache, Memory& memory, std::size_t budget = max_saved_bytes)
        : cache_(cache), memory_(memory), budget_(budget) {}

    // Copy the K/V of `tokens`, the first ones of `slot`. Does nothing if they are too few, do not
    // fit the budget or the memory, or if an older copy begins with them.
    void save(int slot, std::span<const std::int64_t> tokens, const std::string& salt);
    // The best match among the copies with this salt.
    Match match(std::span<const std::int64_t> tokens, const std::string& salt) const;
    // Copy the K/V of the prefix `found` into `slot`, whose cache has room for them.
    void load(const Match& found, int slot);
    // Bytes of all copies.
    std::size_t used() const;

   private:
    // A copy of the K/V of `tokens`, `size` bytes at `address`, for requests with this salt.
    struct SavedPrefix {
        std::string salt;
        std::vector<std::int64_t> tokens;
        std::size_t size;
        std::byte* address;
    };

    void touch(std::size_t index);
    void drop(std::size_t index);

    KVCache& cache_;
    Memory& memory_;
    std::size_t budget_;
    std::vector<SavedPrefix> saved_;
};

}  // namespace pass
