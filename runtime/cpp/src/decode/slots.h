// The slots of a backend, and what each holds: a sequence, its cached tokens and its window.
//
// The K/V of a finished sequence stay in its slot until another sequence needs the slot. A prompt
// reuses K/V of the tokens that it begins with, from a free slot, a slot in use or `PrefixStore`.
// They must have the bits that a prefill would write, unless the request allows other bits. If an
// allocation fails, the records here stay as they were before.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "decode/prefix_cache.h"
#include "decode/sequence.h"

namespace pass {

// A row of the KV cache and of all other buffers, and the sequence in it.
struct Slot {
    int number = 0;
    std::shared_ptr<SequenceState> sequence;
    std::vector<std::int64_t> kept;  // of a free slot: the tokens whose K/V are still in the cache
    std::string salt;                // `cache_salt` of its present or last sequence
    // How many of the slot's first K/V entries have the bits that a prefill would write: those up
    // to a second choice of a tree. It may exceed `cached` of a free slot, which can drop tokens.
    std::int64_t exact_prefix_len = 0;
    int num_drafts = 0;                           // drafts in its window
    TokenSource source = TokenSource::lookahead;  // of these drafts
    bool staged = false;                          // whether its window is on the device
    bool masked = false;  // whether it is masked on the device, with its present length

    // How many tokens have K/V in the cache.
    std::int64_t cached() const {
        return sequence == nullptr ? static_cast<std::int64_t>(kept.size()) : sequence->cached;
    }
    // The tokens whose K/V are in the cache.
    std::span<const std::int64_t> held() const;
};

// Not thread-safe: used by one thread at a time.
class Slots {
   public:
    // prefix_cache: reuse K/V of other sequences where that changes no bit of the results.
    Slots(Backend& backend, bool prefix_cache);

    std::vector<Slot>& all() { return slots_; }
    // Slots that have a sequence.
    std::vector<Slot*> busy();
    // Slots whose sequence is prefilled, so that passes decode it.
    std::vector<Slot*> decoding();
    // How many tokens are left after the longest sequence at the largest KV capacity.
    std::int64_t room();
    // Whether a prompt leaves room for the first pass, whose root is its last token.
    bool fits(std::size_t prompt_tokens) const;

    // Give `sequence` the free slot with the most K/V of its prompt. Returns false if none is free.
    bool admit(const std::shared_ptr<SequenceState>& sequence);
    // Free the slot of a finished sequence. Its K/V stay for later sequences with its prefix, if
    // there is memory to record which tokens they belong to.
    void release(Slot& slot) noexcept;
    // Copy K/V of the slot's prompt from another slot or a saved prefix, if those have more.
    void share(Slot& slot);
    // Move sequences to lower free slots if that shrinks the batch. Returns the decoding slots.
    std::vector<Slot*> compact();

    // Grow the KV capacity to at least `tokens`.
    void reserve(std::int64_t tokens);
    // Make room for windows of `plan` in the first `batch` slots. The cache grows if a sequence
    // needs it. A pass also writes into free slots, after their kept tokens, which are dropped if
    // they leave no room for the window.
    void make_room(const Plan& plan, int batch);
    // Change the KV capacity, which must hold what every slot has cached.
    void resize(std::int64_t capacity);

   private:
    void shrink(std::int64_t tokens, Slot& slot, std::int64_t reused);
    void truncate_kept(Slot& slot, std::int64_t tokens);
    void move(Slot& source, Slot& target);
    std::int64_t reusable(const Slot& slot, const ResolvedRequest& request) const;

    Backend& backend_;
    std::vector<Slot> slots_;
    std::optional<PrefixStore> store_;
    std::int64_t admitted_ = 0;  // how many sequences got a slot so far
};

}  // namespace pass
