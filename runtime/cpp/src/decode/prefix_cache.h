// Copies of the K/V that slots give up, for later prompts that begin with the same tokens.
//
// A slot loses its K/V to the next sequence, or when the KV cache shrinks because a short request
// needs less. Before that, the K/V are copied here, so that a long prompt that many requests begin
// with need not be prefilled again. The copies used least recently make room for others.
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

// Prefixes are shared in blocks of this many tokens. This protects prompts: a short prefill tells a
// client that the prompt of another client began alike, and with blocks it has to guess this many
// tokens at once, not one after the other.
constexpr std::int64_t block_tokens = 16;
// `count` tokens, rounded down to whole blocks.
constexpr std::int64_t rounded_to_blocks(std::int64_t count) {
    return count - count % block_tokens;
}

// Copies of K/V, the most recently used last, for one thread at a time. `memory` frees the copies
// that are left when `memory` is destroyed.
class PrefixStore {
   public:
    static constexpr std::size_t max_saved_bytes = std::size_t{512} << 20;  // of all copies
    static constexpr std::size_t max_saved_prefixes = 64;  // a prompt is compared with each
    static constexpr std::size_t min_saved_tokens = 32;    // prefilling fewer costs a pass or two

    // The copy that has the longest prefix in common with some tokens.
    struct Match {
        std::size_t index = 0;   // of the copy
        std::int64_t count = 0;  // the length of that prefix, in tokens; 0: no copy has one
    };

    PrefixStore(KVCache& cache, Memory& memory, std::size_t budget = max_saved_bytes)
        : cache_(cache), memory_(memory), budget_(budget) {}

    // Copy the K/V of `tokens`, the first ones of `slot`, for requests with this `cache_salt`. Does
    // nothing if they are too few, there is no room for them, or an older copy begins with them.
    void save(int slot, std::span<const std::int64_t> tokens, const std::string& salt);
    // The match of `tokens` among the copies for this salt.
    Match match(std::span<const std::int64_t> tokens, const std::string& salt) const;
    // Copy the K/V of the common prefix into `slot`, whose cache has room for them.
    void load(const Match& match, int slot);
    std::size_t used() const;  // bytes of all copies

   private:
    // A copy of the K/V of `tokens`, `size` bytes at `address`, for requests with `salt`.
    struct SavedPrefix {
        std::string salt;
        std::vector<std::int64_t> tokens;
        std::size_t size;
        std::byte* address;
    };

    void touch(std::size_t index);  // make this copy the most recently used one
    void drop(std::size_t index);

    KVCache& cache_;
    Memory& memory_;
    std::size_t budget_;
    std::vector<SavedPrefix> saved_;
};

}  // namespace pass
