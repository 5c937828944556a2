// The tuners of a session: one for every kind of sampling, whose passes differ in their tails.
#pragma once

#include <map>

#include "runner.h"
#include "tuner.h"

namespace pass {

// The first request times passes of all widths. The first of another kind only times two, since kinds differ in their
// tails, and tails are linear in their rows; the first batch of a size times its trunk.
class Tuners {
   public:
    explicit Tuners(Runner& runner) : runner_(runner) {}

    // Whether `get` has nothing to time.
    bool known(Sampler sampler, int batch) const;

    // The tuner for `sampler`, which knows the times of passes over `batch` slots.
    PlanTuner& get(Sampler sampler, int batch);

   private:
    PassTimes times(Sampler sampler);
    // What can be run now, the narrowest first.
    std::vector<Plan> plans(int batch);
    Curves measured(Sampler sampler, const std::vector<Plan>& plans, int batch);

    Runner& runner_;
    std::map<Sampler, PlanTuner> tuners_;
};

}  // namespace pass
