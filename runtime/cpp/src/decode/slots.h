// What each slot of a backend holds. The K/V of a finished sequence stay there until another needs
// the slot. A prompt reuses K/V of the tokens that it begins with, from any slot or `PrefixStore`.
// If an allocation fails, the records here stay as they were.
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

struct Slot {
    int number = 0;
    std::shared_ptr<SequenceState> sequence;
    std::vector<std::int64_t> kept;  // of a free slot: the tokens whose K/V are still in the cache
    std::string salt;                // `cache_salt` of its present or last sequence
    int num_drafts = 0;              // in its window
    TokenSource source = TokenSource::lookahead;  // of these drafts
    bool staged = false;                          // whether its window is on the device
    bool masked = false;  // whether it is masked there, with its present length

    std::int64_t cached() const {
        return sequence == nullptr ? static_cast<std::int64_t>(kept.size()) : sequence->cached;
    }
    // The tokens whose K/V are in the cache.
    std::span<const std::int64_t> held() const;
};

class Slots {
   public:
    // prefix_cache: reuse K/V where that changes no bit of the results.
    Slots(Backend& backend, bool prefix_cache);

    std::vector<Slot>& all() { return slots_; }
    std::vector<Slot*> busy();
    std::vector<Slot*> decoding();
    // The tokens that are left after the longest sequence at the largest KV capacity.
    std::int64_t room();
    bool fits(std::size_t prompt_tokens) const;

    // To the free slot with the most K/V of the prompt. Returns false if none is free.
    bool admit(const std::shared_ptr<SequenceState>& sequence);
    // The K/V stay for later sequences, if there is memory to record their tokens.
    void release(Slot& slot) noexcept;
    // Copy K/V of the slot's prompt from another slot or a saved prefix that has more.
    void share(Slot& slot);
    // Move sequences down if that shrinks the batch. Returns the decoding slots.
    std::vector<Slot*> compact();

    void reserve(std::int64_t tokens);
    // Make room for a window in the first `batch` slots. The cache grows if a sequence needs it. A
    // pass also writes into free slots, whose kept tokens are dropped if they leave no room.
    void make_room(const Window& window, int batch);
    // The capacity must hold what every slot has cached.
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
