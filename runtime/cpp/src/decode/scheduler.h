// Many requests over few slots: which request gets a slot, whose prompt is read, which pass is run, who leaves.
//
// One step admits waiting requests to free slots, reads part of their prompts, and runs one pass over all slots that
// are past their prompt, so that decoding never waits for a long prompt. An error ends only the sequences that it
// happened to.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "decode/runner.h"
#include "decode/sequence.h"
#include "tuning/tuner.h"

namespace pass {

// `add` and `waiting` may be called from any thread, everything else from one thread at a time.
class Scheduler {
   public:
    // max_concurrency: with more sequences than this decoding, none drafts, whatever plans requests name; none: no
    // limit.
    Scheduler(Runner& runner, Tuners& tuners, std::optional<std::int64_t> max_concurrency)
        : runner_(runner), slots_(runner.slots()), tuners_(tuners), max_concurrency_(max_concurrency) {}

    // Put a sequence at the end of the queue.
    void add(std::shared_ptr<SequenceState> sequence);
    std::size_t waiting() const;
    // One step of all requests. False if there is nothing more to do.
    bool step();
    // End every sequence, those in the queue too.
    void end_all(const End& end);

   private:
    void drop_cancelled();
    void admit();
    void prefill();
    void decode(const std::vector<Slot*>& active);
    std::optional<Pass> choose(const std::vector<Slot*>& active, const std::vector<DraftState>& states,
                               PlanTuner* tuner, int batch, bool may_draft);
    PlanTuner* tuner(const std::vector<Slot*>& active, int batch);
    void deliver(std::vector<StepResult> results);
    // End the longest sequence, for which there is no room; the others go on.
    void end_longest(const std::vector<Slot*>& active, const End& end);
    void finish(Slot& slot, const End& end);
    std::shared_ptr<SequenceState> first_waiting();

    Runner& runner_;
    Slots& slots_;
    Tuners& tuners_;
    std::optional<std::int64_t> max_concurrency_;
    // Guards the queue. Nothing is published to a reader while it is held: `add` is called with the readers' mutex
    // held, so that would be a deadlock.
    mutable std::mutex mutex_;
    std::deque<std::shared_ptr<SequenceState>> waiting_;
};

}  // namespace pass
