// The slots of a backend and what stands in them: which sequence, how much of it in the cache, which window.
//
// The device is told only what changed. Where a pass or an allocation fails, the host's account is as before it, and
// the windows are laid out anew from that account: nothing that half happened is believed.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "backend.h"
#include "draft_policy.h"
#include "sequence.h"

namespace pass {

// One row of the batch.
struct Slot {
    int number = 0;
    std::shared_ptr<Sequence> sequence;
    std::int64_t admitted = 0;       // counts the sequences that joined before
    std::vector<std::int64_t> kept;  // tokens whose K/V are in the cache though no sequence is
    int left = 0;                    // drafts in its window, of `source`
    Source source = Source::lookahead;
    bool entered = false;  // whether its window is on the device
    bool parked = false;   // whether the device knows that it is left out

    // Valid entries of the cache.
    std::int64_t cached() const {
        return sequence == nullptr ? static_cast<std::int64_t>(kept.size()) : sequence->cached;
    }
};

// What a pass did to one sequence: `drafted` drafts were in its window, of `source`, and these tokens came out.
struct Outcome {
    std::shared_ptr<Sequence> sequence;
    int drafted = 0;
    Source source = Source::lookahead;
    std::vector<Token> tokens;
};

struct PassSeconds {
    double trunk = 0, tail = 0;
};

// B slots. Everything here is about one thread at a time: the scheduler's.
class Runner {
   public:
    explicit Runner(Backend& backend);

    Backend& backend() { return backend_; }
    std::vector<Slot>& slots() { return slots_; }
    // Slots that have a sequence.
    std::vector<Slot*> busy();
    // Slots whose sequence is past its prompt.
    std::vector<Slot*> decoding();
    // The plan whose windows are on the device, none where they are to be laid out anew.
    const std::optional<Plan>& window() const { return window_; }
    // Cache columns that a window may write behind the longest sequence, after growing if need be.
    std::int64_t room();
    // Whether a token can be written behind a prompt of so many tokens.
    bool fits(std::size_t prompt) const;

    // Give `sequence` a free slot; false where there is none. With `reuse_prefix` it is the one whose cache begins most
    // like the prompt.
    bool admit(const std::shared_ptr<Sequence>& sequence);
    // The sequence is done; what it left in the cache can serve one that begins alike.
    void release(Slot& slot);
    // One chunk of the prompt, of at most `most` rows; returns how many tokens it held.
    std::int64_t prefill(Slot& slot, std::optional<std::int64_t> most);
    // For windows of `plan` in the first `batch` slots, growing the cache if a sequence needs it. Windows of slots that
    // are free are written too: what those kept gives way.
    void make_room(const Plan& plan, int batch);
    // One pass over every decoding slot, for which there must be room. `drafts`, by slot number, are written into
    // windows that have others or none. Returns what it did, and its seconds.
    std::pair<std::vector<Outcome>, double> run(const Plan& plan, const std::map<int, Drafts>& drafts);
    // Seconds of trunk and tail in a pass in which every slot is parked: it leaves no trace.
    PassSeconds idle_pass(const PassKind& kind);
    // The decoding slots, after moving sequences down into free ones where a smaller batch then covers them all.
    std::vector<Slot*> gather();
    // Slots that a pass over `active` runs over.
    int batch(const std::vector<Slot*>& active) const;
    // The cheapest that draws as each of `active` asks: the later ones compute what the earlier ones do.
    static Sampler sampler(const std::vector<Slot*>& active);

   private:
    void lay_out(const PassKind& kind, const std::map<int, Drafts>& drafts);
    void park(Slot& slot);
    Outcome take(Slot& slot, const Plan& plan, const std::vector<std::int64_t>& ids, const Logprobs* logprobs);
    void reserve(std::int64_t columns);
    void fit(std::int64_t columns, Slot& slot, std::size_t keep);
    void resize(std::int64_t capacity);
    void move(Slot& source, Slot& target);
    std::pair<std::int64_t, int> chunk(std::int64_t start, std::int64_t stop, std::optional<std::int64_t> most) const;

    Backend& backend_;
    std::vector<Slot> slots_;
    std::optional<Plan> window_;
    Sampler sampler_ = Sampler::greedy;  // of the last pass
    std::int64_t admitted_ = 0;
    double engine_seconds_ = 0.0;  // in passes, those over prompts included
};

}  // namespace pass
