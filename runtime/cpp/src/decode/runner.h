// Runs passes over the sequences in the slots of a backend, and reads their prompts.
//
// Only changes are written to the device. Where a pass fails, the records of slots and sequences stay as they were
// before it, and the windows are written again from them.
#pragma once

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "backends/backend.h"
#include "decode/draft_policy.h"
#include "decode/slots.h"
#include "decode/step_result.h"

namespace pass {

struct PassSeconds {
    double trunk = 0, tail = 0;
};

// Not thread-safe: the scheduler calls it from one thread at a time.
class Runner {
   public:
    Runner(Backend& backend, bool prefix_cache) : backend_(backend), slots_(backend, prefix_cache) {}

    Backend& backend() { return backend_; }
    Slots& slots() { return slots_; }
    // The plan whose windows are on the device; none where they must be written again.
    const std::optional<Plan>& window() const { return window_; }

    // Read one chunk of the prompt, in a window of at most `most` rows; returns the number of its tokens.
    std::int64_t prefill(Slot& slot, std::optional<std::int64_t> most);
    // One pass over every decoding slot; `Slots::make_room` must have been called. drafts: n-gram drafts by slot
    // number, which replace those in the slot's window. Returns what the pass did for each sequence, and its seconds.
    std::pair<std::vector<StepResult>, double> run(const Plan& plan, const std::map<int, Drafts>& drafts);
    // Time a pass with every slot masked, which changes no sequence: the seconds of its trunk and its tail.
    PassSeconds idle_pass(const PassKind& kind);
    // Run a pass so many times with every slot masked, which changes no sequence.
    void rehearse(const PassKind& kind, int runs);
    // Run a chunk of a prompt so many times, after the tokens that a free slot keeps.
    void rehearse_prefill(int slot, int width, int runs);
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
    void stage_masked(const PassKind& kind);

    Backend& backend_;
    Slots slots_;
    std::optional<Plan> window_;
    Sampler sampler_ = Sampler::greedy;  // the one of the last pass
    double engine_seconds_ = 0.0;        // spent in passes, over prompts too
};

}  // namespace pass
