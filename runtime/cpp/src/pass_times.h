// What a pass costs: the trunk by batch and window width, the tail by rows, measured on the machine at hand.
#pragma once

#include <functional>
#include <map>
#include <vector>

#include "plan.h"
#include "runner.h"

namespace pass {

using Points = std::map<int, double>;  // seconds by rows

// Linear between the points, and behind the last one as from the first to it.
double between(const Points& points, int at);

// Seconds: `trunk` by window width, `tail` by sampled rows, of a pass over one slot. `batched`: the trunk by width for
// other batch sizes, where they were measured.
struct PassTimes {
    Points trunk, tail;
    std::map<int, Points> batched;

    // For another tail, whose passes were timed at fewer widths: the trunk as it was, times what it takes longer there.
    PassTimes with_tail(const Points& some_trunk, Points other_tail) const;
    int max_width() const { return trunk.rbegin()->first; }
    // Of one pass. A batch that nobody measured is taken for a window of as many rows.
    double seconds(int width, int sampled_rows, int batch = 1) const;
    double plan_seconds(const Plan& plan, int batch = 1) const {
        return seconds(plan.width(), plan.sampled_rows(), batch);
    }
};

// Plans that together show widths from 1 to the widest a bundle with `lookahead` rows has: few of them, since pass
// times are nearly linear in between.
std::vector<Plan> probe_plans(int lookahead, int batch = 1);

// Time passes over `plans` in alternation: the trunk by width, and the tail by sampled rows. Of each plan it is the
// least, since whatever disturbs a pass only makes it slower.
std::pair<Points, Points> measure(const std::function<PassSeconds(const Plan&)>& time, const std::vector<Plan>& plans);

}  // namespace pass
