// What `auto` measures: how long passes take, and how often drafts are accepted.
#pragma once

#include <compare>
#include <functional>
#include <map>
#include <vector>

#include "bundle/plan.h"

namespace pass {

// Conditional acceptance: the rate at which draft i is accepted if all drafts before it were. A running average, which
// starts from what was measured in training.
class Acceptance {
   public:
    // weight: the number of passes that `prior` counts for.
    explicit Acceptance(std::vector<double> prior, double weight = 10.0);

    std::vector<double> rates() const;
    // Record that `accepted` of `drafted` drafts were accepted in a pass. The weight of earlier passes decays.
    void record(int drafted, int accepted);
    // After a pass without these drafts: move slowly back to the prior, so that they will be tried again.
    void forget();

   private:
    void move_towards(std::size_t i, double rate, double share);

    std::vector<double> prior_, hits_, trials_;
};

// Conditional acceptance rates [L] -> cumulative acceptance [L+1]: entry i is the probability that drafts 1..i are all
// accepted.
std::vector<double> cumulative_acceptance(const std::vector<double>& rates);

struct PassSeconds {
    double trunk = 0, tail = 0;
};

// What the time of a pass depends on, for all slots together: rows of the windows, rows that tokens are sampled from,
// and drafts that are made.
struct PassShape {
    int rows = 0, sampled = 0, drafts = 0;

    auto operator<=>(const PassShape&) const = default;
};

inline PassShape shape_of(const Plan& plan, int batch = 1) {
    return {batch * plan.width(), batch * (plan.drafts + 1), batch * plan.next().drafts};
}

using TimedPasses = std::map<PassShape, PassSeconds>;

// Straight lines between points, which never fall, and level before the first. Beyond the last they are as steep as the
// last of them or all in the mean, whichever is steeper; level if `flat`.
class Line {
   public:
    explicit Line(std::map<int, double> points = {{0, 0.0}}, bool flat = false);
    double operator()(int x) const;

   private:
    std::map<int, double> points_;
    double rise_ = 0;
};

// Seconds of a pass by its shape: what timed passes say, times a ratio that this shape was found to have, times the
// slowness that all passes have in common. What timed passes say is the sum of four lines: the trunk by rows, what it
// takes more with look-ahead rows, the tail by sampled rows, and what it takes more by drafts.
class PassTimes {
   public:
    // like: the times for another sampler, which differ in the tail and, as the machine's speed may have changed, by a
    // factor. Few shapes need be timed then.
    explicit PassTimes(const TimedPasses& timed, const PassTimes* like = nullptr);

    double seconds(const PassShape& shape) const;
    // Correct the estimate by a pass that took so long: at first the ratio of its shape, relative to those of the
    // shapes that ran, and later the slowness of all.
    void record(const PassShape& shape, double seconds);
    int max_rows() const { return max_rows_; }
    double slowness() const { return slowness_; }

   private:
    double trunk_seconds(const PassShape& shape) const;

    int max_rows_ = 0;  // of the passes that were timed
    double slowness_ = 1.0;
    Line trunk_, adapter_, tail_, drafts_;
    std::map<PassShape, double> ratios_;
    std::map<PassShape, int> passes_;
};

// The plans to time: few of them, from the narrowest to the widest that a bundle with `lookahead` look-ahead rows has.
std::vector<Plan> probe_plans(int lookahead, int batch = 1);

// Time passes of `plans` in alternation, and take the least time of each: disturbances only make a pass slower.
std::vector<PassSeconds> measure(const std::function<PassSeconds(const Plan&)>& time, const std::vector<Plan>& plans);

}  // namespace pass
