// What `auto` measures: how long passes take, and how often drafts are accepted.
#pragma once

#include <compare>
#include <functional>
#include <map>
#include <vector>

#include "bundle/plan.h"

namespace pass {

// For one kind of drafts (such as a sequence's n-grams): running averages, by position i, of how
// often draft i is accepted if all drafts before it are.
class ConditionalAcceptance {
   public:
    // prior: the initial rates. weight: how many passes they count for.
    explicit ConditionalAcceptance(std::vector<double> prior, double weight = 10.0);

    std::vector<double> rates() const;
    // Count a pass that accepted `accepted` of `drafted` drafts. The weight of older passes fades.
    void record(int drafted, int accepted);
    // Count a pass that verified no drafts of this kind: the rates drift slowly back to the initial
    // ones, so that such drafts are tried again.
    void forget();

   private:
    // Move rate i towards `rate` by this share of the difference.
    void move_towards(std::size_t i, double rate, double share);

    // By position: the initial rates, and weighted counts of accepted and of verified drafts.
    std::vector<double> prior_, hits_, trials_;
};

// [L] conditional rates -> [L+1]: the probabilities that the first i drafts are all accepted.
std::vector<double> cumulative_acceptance(const std::vector<double>& rates);

// The seconds that the two parts of a pass take.
struct PassSeconds {
    double trunk = 0, tail = 0;
};

// What the time of a pass depends on: for all slots together, the rows of the windows, the rows
// from which tokens are sampled, and the drafts that the pass makes for the next windows.
struct PassShape {
    int rows = 0, sampled = 0, drafts = 0;

    auto operator<=>(const PassShape&) const = default;
};

inline PassShape shape_of(const Plan& plan, int batch = 1) {
    return {batch * plan.width(), batch * (plan.drafts + 1), batch * plan.next().drafts};
}

using TimedPasses = std::map<PassShape, PassSeconds>;

// A piecewise linear function through `points` that never falls: a point that is lower than an
// earlier one is raised to that. The function is constant before the first point. Beyond the last
// point it is constant if `flat`; else it rises like the last piece or like the line from the first
// point to the last, whichever is steeper.
class Line {
   public:
    explicit Line(std::map<int, double> points = {{0, 0.0}}, bool flat = false);
    double operator()(int x) const;

   private:
    std::map<int, double> points_;
    double rise_ = 0;  // beyond the last point
};

// Seconds of a pass by its shape: an estimate from timed passes, times a ratio that corrects it for
// this shape, times the slowness of all passes (on a busy machine, or in a longer text).
class PassTimes {
   public:
    // other_sampler: the times of passes with another sampler (see `Sampler`), or null. The trunk's
    // time does not depend on the sampler, so its estimate is that of `other_sampler`, scaled to
    // match the trunk's times in `timed`. Then few shapes in `timed` are enough.
    explicit PassTimes(const TimedPasses& timed, const PassTimes* other_sampler = nullptr);

    double seconds(const PassShape& shape) const;
    // Correct the estimate by a pass that took `seconds`. The first passes of a shape correct
    // mostly its ratio, later passes mostly the slowness of all shapes.
    void record(const PassShape& shape, double seconds);
    int max_rows() const { return max_rows_; }
    double slowness() const { return slowness_; }

   private:
    double trunk_seconds(const PassShape& shape) const;

    int max_rows_ = 0;  // of the passes that were timed
    double slowness_ = 1.0;
    // The estimate is the sum of these seconds.
    Line trunk_;    // the trunk, by rows
    Line adapter_;  // the trunk's extra time if the pass makes drafts, by rows
    Line tail_;     // the tail, by sampled rows
    Line drafts_;   // the tail's extra time, by drafts
    std::map<PassShape, double> ratios_;  // how much longer passes took than estimated
    std::map<PassShape, int> passes_;     // how many passes were recorded
};

// The plans to time: a few from the narrowest to the widest of a bundle, since pass times are
// nearly linear in between.
std::vector<Plan> probe_plans(int lookahead, int batch = 1);

// Measure passes of each plan, in turn and several times. Returns the shortest times, because
// disturbances only make passes slower.
std::vector<PassSeconds> measure(const std::function<PassSeconds(const Plan&)>& time,
                                 const std::vector<Plan>& plans);

}  // namespace pass
