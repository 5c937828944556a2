// Many requests, few slots: who joins, whose prompt is read, which pass is run, who leaves.
//
// One round admits what fits, reads some of the prompts, and runs one pass over everybody else: nobody waits for a
// neighbour's long prompt. What fails ends the sequences that it happened to, and no others.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "runner.h"
#include "sequence.h"
#include "tuners.h"

namespace pass {

// Everything but `add`, `waiting` and `idle` is for one thread at a time.
class Scheduler {
   public:
    Scheduler(Runner& runner, Tuners& tuners, std::size_t max_queue)
        : runner_(runner), tuners_(tuners), max_queue_(max_queue) {}

    // Put a sequence at the end of the queue; throws QueueFull.
    void add(std::shared_ptr<Sequence> sequence);
    std::size_t waiting() const;
    // One step of everybody. False where there is nothing more to do.
    bool round();
    // Finish every sequence, waiting ones too.
    void end_all(const End& end);

   private:
    void drop_cancelled();
    void admit();
    void prefill();
    void decode(const std::vector<Slot*>& active);
    std::optional<Pass> choose(const std::vector<Slot*>& active, const std::vector<View>& views, PlanTuner* tuner,
                               int batch);
    PlanTuner* tuner(const std::vector<Slot*>& active, int batch);
    void deliver(std::vector<Outcome> outcomes);
    // The sequence that there is no room for; the others go on.
    void end_longest(const std::vector<Slot*>& active, const End& end);
    void finish(Slot& slot, const End& end);
    std::shared_ptr<Sequence> first_waiting();

    Runner& runner_;
    Tuners& tuners_;
    std::size_t max_queue_;
    // Of the queue. Nobody is told anything under it: `add` is called under the lock that telling takes.
    mutable std::mutex mutex_;
    std::deque<std::shared_ptr<Sequence>> waiting_;
};

}  // namespace pass
