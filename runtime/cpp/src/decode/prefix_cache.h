// K/V that slots give up, kept beside them for prompts that begin with the same tokens.
//
// A slot has the K/V of one sequence, and a KV cache that is longer than what is decoded needs is shortened. So that a
// short request does not cost the long prompt that hundreds of others begin with, what a slot gives up is copied here
// first. The texts used least recently make room for others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backends/kv_cache.h"
#include "backends/memory.h"

namespace pass {

// How many tokens two sequences have in common at their beginnings.
std::int64_t common_prefix(std::span<const std::int64_t> a, std::span<const std::int64_t> b);

// The tokens of `count` that are in whole blocks. Only those are shared: how many a prompt found in the KV cache, and
// so how long it took to read, tells whether others began with a whole block, and never one token of theirs after
// another.
constexpr std::int64_t block_tokens = 16;
constexpr std::int64_t whole_blocks(std::int64_t count) { return count - count % block_tokens; }

// Texts and their K/V, the one used last at the end. Like the runner, for one thread at a time. What is kept when this
// ends is freed with the memory.
class PrefixStore {
   public:
    static constexpr std::size_t max_saved_bytes = std::size_t{512} << 20;  // bytes, for the K/V of all texts
    static constexpr std::size_t max_saved_prefixes = 64;                   // a prompt is compared with each of them
    static constexpr std::size_t min_saved_tokens = 32;  // of a text: reading fewer again costs a pass or two

    // Which text begins most like some tokens, and how many of them it has; 0 if none has the first.
    struct Match {
        std::size_t text = 0;
        std::int64_t count = 0;
    };

    PrefixStore(KVCache& cache, Memory& memory, std::size_t budget = max_saved_bytes)
        : cache_(cache), memory_(memory), budget_(budget) {}

    // Copy the K/V of `tokens`, the first ones of `slot`. Too few, too many, or without memory for them, they are not
    // kept; those of a longer text that begins with them are kept already.
    void save(int slot, std::span<const std::int64_t> tokens, const std::string& salt);
    // Of the texts with this salt.
    Match match(std::span<const std::int64_t> tokens, const std::string& salt) const;
    // Copy what `found` has in common with some tokens into `slot`, whose cache has room for it.
    void load(const Match& found, int slot);

    std::size_t texts() const { return texts_.size(); }
    // Bytes of what is kept.
    std::size_t used() const;

   private:
    // `size` bytes at `address`.
    struct Text {
        std::string salt;
        std::vector<std::int64_t> tokens;
        std::size_t size;
        std::byte* address;
    };

    void touch(std::size_t text);
    void drop(std::size_t text);

    KVCache& cache_;
    Memory& memory_;
    std::size_t budget_;
    std::vector<Text> texts_;
};

}  // namespace pass
