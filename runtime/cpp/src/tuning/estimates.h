// What `auto` measures: how long passes take, and how often drafts are accepted.
#pragma once

#include <compare>
#include <functional>
#include <map>
#include <vector>

#include "bundle/plan.h"

namespace pass {

// Running averages, by position i, of how often draft i is accepted if all drafts before it are.
class ConditionalAcceptance {
   public:
    // prior: the initial rates. weight: how many passes they count for.
    explicit ConditionalAcceptance(std::vector<double> prior, double weight = 10.0);

    std::vector<double> rates() const;
    // Count one pass that accepted `accepted` of `drafted` drafts.
    void record(int drafted, int accepted);
    // Count a pass that verified no drafts of this kind: the rates drift slowly back to the initial
    // ones, so that such drafts are tried again.
    void forget();

   private:
    // Move rate i towards `rate` by this share of the difference.
    void move_towards(std::size_t i, double rate, double share);

    std::vector<double> prior_, hits_, trials_;
};

// [L] conditional rates -> [L+1]: the probabilities that the first i drafts are all accepted.
std::vector<double> cumulative_acceptance(const std::vector<double>& rates);

struct PassSeconds {
    double trunk = 0, tail = 0;
};

// What the time of a pass depends on, for all slots together. rows: of the windows. sampled: rows
// from which tokens are sampled. drafts: those that the pass makes for the next one.
struct PassShape {
    int rows = 0, sampled = 0, drafts = 0;

    auto operator<=>(const PassShape&) const = default;
};

inline PassShape shape_of(const Plan& plan, int batch = 1) {
    return {batch * plan.width(), batch * (plan.drafts + 1), batch * plan.next().drafts};
}

using TimedPasses = std::map<PassShape, PassSeconds>;

// A piecewise linear function through `points` that never falls: a point that is lower than one
// before it is raised to that one. Before the first point the function is constant. Beyond the last
// it is constant if `flat`; else it rises like the last piece or like the line from the first point
// to the last, whichever is steeper.
class Line {
   public:
    explicit Line(std::map<int, double> points = {{0, 0.0}}, bool flat = false);
    double operator()(int x) const;

   private:
    std::map<int, double> points_;
    double rise_ = 0;  // beyond the last point
};

// Seconds of a pass by its shape: an estimate from timed passes (the sum of four lines), times a
// correction for this shape, times the slowness of all passes (on a busy machine, in a longer
// text).
class PassTimes {
   public:
    // other_sampler: the times for another sampler, if there are some: its estimate of the trunk is
    // used, scaled by how fast the trunk is now, so that `timed` needs few shapes.
    explicit PassTimes(const TimedPasses& timed, const PassTimes* other_sampler = nullptr);

    double seconds(const PassShape& shape) const;
    // Correct the estimate by a pass that took `seconds`. The first passes of a shape mostly change
    // its own correction, later ones mostly the slowness of all.
    void record(const PassShape& shape, double seconds);
    int max_rows() const { return max_rows_; }
    double slowness() const { return slowness_; }

   private:
    double trunk_seconds(const PassShape& shape) const;

    int max_rows_ = 0;  // of the passes that were timed
    double slowness_ = 1.0;
    Line trunk_,
        adapter_;  // seconds of the trunk by rows, and what it takes longer with look-ahead rows
    Line tail_, drafts_;  // seconds of the tail by sampled rows, and those that drafts add
    std::map<PassShape, double> ratios_;  // the corrections
    std::map<PassShape, int> passes_;     // how many passes were recorded
};

// The plans to time: a few from the narrowest to the widest of a bundle, since pass times are
// nearly linear in between.
std::vector<Plan> probe_plans(int lookahead, int batch = 1);

// Time passes of `plans` in turn, and return the shortest times, which disturbances changed least.
std::vector<PassSeconds> measure(const std::function<PassSeconds(const Plan&)>& time,
                                 const std::vector<Plan>& plans);

}  // namespace pass
