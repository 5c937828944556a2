// What a pass costs on this machine: straight lines through a few timed passes, corrected by every later one.
#pragma once

#include <compare>
#include <functional>
#include <map>
#include <vector>

#include "bundle/plan.h"
#include "decode/runner.h"

namespace pass {

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
