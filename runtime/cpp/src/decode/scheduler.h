// Continuous batching: which sequences get slots, whose prompt is prefilled, which pass is run.
//
// One step admits waiting sequences to free slots, prefills some prompt chunks, and runs one pass
// over all sequences that decode. So no sequence waits until another's long prompt is prefilled. An
// error ends only the sequences that it concerns.
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

// `add` may be called from any thread, everything else from one thread at a time.
class Scheduler {
   public:
    // max_concurrency: if more sequences than this decode, all decode without drafts, whatever
    // plans requests name. None: no limit.
    Scheduler(Runner& runner, Tuners& tuners, std::optional<std::int64_t> max_concurrency)
        : runner_(runner),
          slots_(runner.slots()),
          tuners_(tuners),
          max_concurrency_(max_concurrency) {}

    // Put a sequence at the end of the queue.
    void add(std::shared_ptr<SequenceState> sequence);
    // Run a step, after ending cancelled sequences. Returns whether any sequences are left.
    bool step();
    // Finish every sequence, waiting ones too: with `end`, or as cancelled if it was cancelled.
    void end_all(const End& end) noexcept;

   private:
    void drop_cancelled();
    void admit();
    void prefill();
    void decode(const std::vector<Slot*>& active);
    std::optional<NextPass> choose_pass(const std::vector<Slot*>& active,
                                        const std::vector<DraftState>& states, Tuner* tuner,
                                        int batch, bool may_draft);
    Tuner* tuner_for(const std::vector<Slot*>& active, int batch);
    void deliver(std::vector<SlotResult> results);
    // End the longest sequence, for which there is no room. The others go on.
    void end_longest(const std::vector<Slot*>& active, const End& end);
    void finish(Slot& slot, const End& end) noexcept;
    std::shared_ptr<SequenceState> first_waiting() noexcept;

    Runner& runner_;
    Slots& slots_;
    Tuners& tuners_;
    std::optional<std::int64_t> max_concurrency_;
    // Guards `waiting_`. Do not hold it while a sequence publishes, which locks the readers' mutex:
    // `add` is called with that mutex held, so both threads could wait for each other.
    std::mutex mutex_;
    std::deque<std::shared_ptr<SequenceState>> waiting_;
};

}  // namespace pass
