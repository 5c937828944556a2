// The slots of a backend: which sequence is in each, how much of it is in the KV cache, and which window is on the
// device.
//
// Only changes are written to the device. Where a pass or an allocation fails, these records stay as they were before
// it, and the windows are written again from them.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "backends/backend.h"
#include "decode/draft_policy.h"
#include "decode/sequence.h"

namespace pass {

// One row of the batch.
struct Slot {
    int number = 0;
    std::shared_ptr<Sequence> sequence;
    std::int64_t admitted = 0;       // the number of this admission; a lower one was earlier
    std::vector<std::int64_t> kept;  // of a free slot: tokens whose K/V are still in the cache, for prefix reuse
    int left = 0;                    // drafts in its window, which came from `source`
    TokenSource source = TokenSource::lookahead;
    bool staged = false;  // whether the window on the device is this sequence's next one
    bool masked = false;  // whether the device leaves this slot out of passes

    // Valid entries of this slot's KV cache.
    std::int64_t cached() const {
        return sequence == nullptr ? static_cast<std::int64_t>(kept.size()) : sequence->cached;
    }
};

// What a pass did for one sequence: its window held drafts from `source`, `drafted` one after another, and the pass
// emitted `tokens`.
struct StepResult {
    std::shared_ptr<Sequence> sequence;
    int drafted = 0;
    TokenSource source = TokenSource::lookahead;
    int chain = 0;  // of the accepted drafts, how many from the first on were first choices; others are of a tree
    int last = 0;   // the row of the last accepted draft
    std::vector<Token> tokens;
};

struct PassSeconds {
    double trunk = 0, tail = 0;
};

// The slots of one backend. Not thread-safe: the scheduler calls it from one thread at a time.
class Runner {
   public:
    explicit Runner(Backend& backend);

    Backend& backend() { return backend_; }
    std::vector<Slot>& slots() { return slots_; }
    // Slots that hold a sequence.
    std::vector<Slot*> busy();
    // Slots whose sequence has its prompt in the KV cache.
    std::vector<Slot*> decoding();
    // The plan whose windows are on the device; none where they must be written again.
    const std::optional<Plan>& window() const { return window_; }
    // Tokens that the KV cache can take after the longest sequence, once it has grown as far as it can.
    std::int64_t room();
    // Whether the KV cache can take a token after a prompt of `prompt` tokens.
    bool fits(std::size_t prompt) const;

    // Give `sequence` a free slot; false where there is none. With `reuse_prefix` it gets the slot whose cache has the
    // longest prefix in common with the prompt.
    bool admit(const std::shared_ptr<Sequence>& sequence);
    // Take the sequence out of `slot`. Its K/V stay for a later request with the same prefix.
    void release(Slot& slot);
    // Read one chunk of the prompt, in a window of at most `most` rows; returns the number of its tokens.
    std::int64_t prefill(Slot& slot, std::optional<std::int64_t> most);
    // Make room for windows of `plan` in the first `batch` slots, growing the KV cache where a sequence needs it. A
    // pass also writes into free slots, so their kept K/V are cut where the window does not fit after them.
    void make_room(const Plan& plan, int batch);
    // One pass over every decoding slot; `make_room` must have been called. drafts: n-gram drafts by slot number, which
    // replace those in the slot's window. Returns what the pass did for each sequence, and its seconds.
    std::pair<std::vector<StepResult>, double> run(const Plan& plan, const std::map<int, Drafts>& drafts);
    // Time a pass with every slot masked, which changes no sequence: the seconds of its trunk and its tail.
    PassSeconds idle_pass(const PassKind& kind);
    // Run a pass so many times with every slot masked, which changes no sequence.
    void rehearse(const PassKind& kind, int runs);
    // Run a chunk of a prompt so many times, after the tokens that a free slot keeps.
    void rehearse_prefill(int slot, int width, int runs);
    // Change the KV capacity, which must hold what every slot has cached.
    void resize(std::int64_t capacity);
    // The decoding slots, after sequences were moved into lower free slots where a smaller batch then covers all of
    // them.
    std::vector<Slot*> gather();
    // The batch size of a pass over the slots `active`.
    int batch(const std::vector<Slot*>& active) const;
    // The cheapest sampler that serves all of `active`: a later sampler also computes what the earlier ones do.
    static Sampler sampler(const std::vector<Slot*>& active);

   private:
    void lay_out(const PassKind& kind, const std::map<int, Drafts>& drafts);
    // Set what the logits processors do in a pass whose windows are staged.
    void process(const PassKind& kind, const std::vector<Slot*>& active);
    void mask(Slot& slot);
    void count(Slot& slot, const StepResult& result, int left) noexcept;
    void reserve(std::int64_t tokens);
    void fit(std::int64_t tokens, Slot& slot, std::size_t kept);
    void stage_masked(const PassKind& kind);
    void move(Slot& source, Slot& target);
    std::pair<std::int64_t, int> chunk(std::int64_t start, std::int64_t stop, std::optional<std::int64_t> most) const;

    Backend& backend_;
    std::vector<Slot> slots_;
    std::optional<Plan> window_;
    Sampler sampler_ = Sampler::greedy;  // the one of the last pass
    std::int64_t admitted_ = 0;
    double engine_seconds_ = 0.0;  // spent in passes, over prompts too
};

}  // namespace pass
