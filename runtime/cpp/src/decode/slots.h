// The slots of a backend: which sequence is in each, and how much of it is in the KV cache.
//
// A finished sequence's K/V stay in its slot until another sequence needs it. A prompt that begins with the same tokens
// uses them again, as well as those of a slot that is in use and those that slots have given up (`PrefixStore`), if
// that changes no bit of what follows. If an allocation fails, these records stay as they were before it.
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

// One row of the batch.
struct Slot {
    int number = 0;
    std::shared_ptr<SequenceState> sequence;
    std::vector<std::int64_t> kept;  // of a free slot: tokens whose K/V are still in the cache
    std::string salt;                // of its present or last sequence, whose K/V are in the cache
    // Length of the cached prefix that is bit-identical to a fresh prefill. It may exceed the cached length; clamp it
    // with min().
    std::int64_t exact_prefix_len = 0;
    int num_drafts = 0;  // drafts in its window, which came from `source`
    TokenSource source = TokenSource::lookahead;
    bool staged = false;  // whether the window on the device is this sequence's next one
    bool masked = false;  // whether the device leaves this slot out of passes

    // Valid entries of this slot's KV cache.
    std::int64_t cached() const {
        return sequence == nullptr ? static_cast<std::int64_t>(kept.size()) : sequence->cached;
    }
    // The tokens that these are of.
    std::span<const std::int64_t> held() const;
};

// Not thread-safe: used by one thread at a time.
class Slots {
   public:
    // prefix_cache: K/V of other sequences are used again without being asked for, on engines with which that changes
    // no bit of what follows.
    Slots(Backend& backend, bool prefix_cache);

    std::vector<Slot>& all() { return slots_; }
    // Slots that hold a sequence.
    std::vector<Slot*> busy();
    // Slots whose sequence has its prompt in the KV cache.
    std::vector<Slot*> decoding();
    // Tokens that the KV cache can take after the longest sequence, once it has grown as far as it can.
    std::int64_t room();
    // Whether the KV cache can take a token after a prompt of `prompt` tokens.
    bool fits(std::size_t prompt) const;

    // Give `sequence` the free slot that holds most of its prompt already; false if no slot is free.
    bool admit(const std::shared_ptr<SequenceState>& sequence);
    // Take the sequence out of `slot`. Its K/V stay, for a later prompt that begins with the same tokens.
    void release(Slot& slot);
    // Copy the K/V of the prompt of `slot` from where there are more of them: another slot, or what slots gave up.
    void share(Slot& slot);
    // The decoding slots, after sequences were moved into lower free slots if a smaller batch then covers all of
    // them.
    std::vector<Slot*> gather();

    // Grow the KV cache to at least `tokens`.
    void reserve(std::int64_t tokens);
    // Make room for windows of `plan` in the first `batch` slots, growing the KV cache if a sequence needs it. A
    // pass also writes into free slots, so their kept K/V are cut if the window does not fit after them.
    void make_room(const Plan& plan, int batch);
    // Change the KV capacity, which must hold what every slot has cached.
    void resize(std::int64_t capacity);

   private:
    void fit(std::int64_t tokens, Slot& slot, std::int64_t kept);
    void keep(Slot& slot, std::int64_t tokens);
    void move(Slot& source, Slot& target);
    std::int64_t shared(const Slot& slot, const ResolvedRequest& request) const;

    Backend& backend_;
    std::vector<Slot> slots_;
    std::optional<PrefixStore> store_;
    std::int64_t admitted_ = 0;
};

}  // namespace pass
