// The tuners of a session: one for each sampler, since their passes differ in the tail.
#pragma once

#include <map>
#include <vector>

#include "decode/runner.h"
#include "tuning/tuner.h"

namespace pass {

// The first request with plan `auto` times passes of all widths. The first one of another sampler times only the
// passes that show how its tail differs. The first batch of a new size is timed,
// too.
//
// Which passes are timed depends on the bundle, the engine and the KV capacity alone. While the sequences of the moment
// leave too little room for those passes, nothing is timed.
class Tuners {
   public:
    explicit Tuners(Runner& runner);

    // Whether `get` would have nothing to time.
    bool known(Sampler sampler, int batch) const;

    // The tuner for `sampler`, with the times of passes over `batch` slots; times them first where need be. Null while
    // there is no room for the timed windows after the sequences in the KV cache; always, where the capacity is too
    // small.
    PlanTuner* get(Sampler sampler, int batch);

   private:
    // Whether the KV cache has room now for the passes that are timed with one slot and with `batch` slots.
    bool fits(int batch) const;
    // The times of passes over `batch` slots. Where those for another sampler are known, few passes are timed.
    PassTimes times(Sampler sampler, int batch);
    // The plans to time over `batch` slots, the narrowest first. Their windows have at most half the capacity, so that
    // there is room for them at most times. None where a single width is left, from which no line can be drawn: a batch
    // then counts as a window of as many rows.
    std::vector<Plan> timed_plans(int batch) const;

    Runner& runner_;
    std::map<int, std::vector<Plan>> plans_;  // the plans to time, by batch size
    std::map<Sampler, PlanTuner> tuners_;
};

}  // namespace pass
