// Copies of the K/V that slots give up to the next sequence, or when the cache shrinks, for later
// prompts that begin with the same tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backends/kv_cache.h"
#include "backends/memory.h"

namespace pass {

// In tokens.
std::int64_t common_prefix(std::span<const std::int64_t> a, std::span<const std::int64_t> b);

// Prefixes are shared in blocks. A short prefill tells a client that another's prompt began alike:
// with blocks it has to guess this many tokens at once, not one after the other.
constexpr std::int64_t block_tokens = 16;
constexpr std::int64_t rounded_to_blocks(std::int64_t count) {
    return count - count % block_tokens;
}

// The copies used least recently make room for others. `memory` frees what is left when it is
// destroyed.
class PrefixStore {
   public:
    static constexpr std::size_t max_saved_bytes = std::size_t{512} << 20;  // of all copies
    static constexpr std::size_t max_saved_prefixes = 64;  // a prompt is compared with each
    static constexpr std::size_t min_saved_tokens = 32;    // prefilling fewer costs a pass or two

    // The copy with the longest common prefix.
    struct Match {
        std::size_t index = 0;
        std::int64_t count = 0;  // of tokens; 0: no copy has one
    };

    PrefixStore(KVCache& cache, Memory& memory, std::size_t budget = max_saved_bytes)
        : cache_(cache), memory_(memory), budget_(budget) {}

    // Copy the K/V of `tokens`, the first ones of `slot`, unless they are too few, there is no room
    // for them, or an older copy begins with them.
    void save(int slot, std::span<const std::int64_t> tokens, const std::string& salt);
    Match match(std::span<const std::int64_t> tokens, const std::string& salt) const;
    // Copy the K/V of the common prefix into `slot`, which has room for them.
    void load(const Match& match, int slot);
    std::size_t used() const;  // bytes of all copies

   private:
    struct SavedPrefix {
        std::string salt;
        std::vector<std::int64_t> tokens;
        std::size_t size;
        std::byte* address;
    };

    void touch(std::size_t index);  // move it to the end
    void drop(std::size_t index);

    KVCache& cache_;
    Memory& memory_;
    std::size_t budget_;
    std::vector<SavedPrefix> saved_;
};

}  // namespace pass
