// Seconds of a pass on this machine, interpolated from a few timed passes: trunk by window width, tail by rows.
#pragma once

#include <functional>
#include <map>
#include <vector>

#include "bundle/plan.h"
#include "decode/runner.h"

namespace pass {

using Points = std::map<int, double>;  // seconds by rows

// Linear interpolation between the points. Beyond the last one, the line through the first and the last point, but
// never decreasing. Throws where it cannot be computed: without points, and with one point that is for another number
// of rows.
double between(const Points& points, int at);

// Seconds of a pass by its rows. Passes that draft have curves of their own, because an adapter costs the same for one
// look-ahead row as for many, and a draft head runs once for every draft. Where none were timed, such a pass is assumed
// to cost as much as another one with as many rows.
struct Curves {
    Points trunk;      // by window width, without look-ahead rows
    Points tail;       // by rows that tokens are drawn from, in passes that make no drafts
    Points lookahead;  // the trunk by window width, with look-ahead rows
    Points drafting;   // the tail by the drafts that it makes besides one token

    // Of a pass that draws tokens from `targets` rows of its window and makes `drafts` drafts for the next one.
    double seconds(int width, int targets, int drafts) const;

   private:
    // The trunk over a window of `width` rows with look-ahead rows among them. Where such windows were timed at a
    // single width, the extra time there is added at every width.
    double lookahead_trunk(int width) const;
};

// The curves of one slot, and those of the other batch sizes that were timed, by the rows of each slot.
struct PassTimes {
    Curves single;
    std::map<int, Curves> batched;

    // The times with another tail, of which fewer widths were timed (`now`): its own tail times, and these trunk times
    // multiplied by the mean ratio of the trunk times now to those then.
    PassTimes with_tail(const Curves& now) const;
    int max_width() const;
    // A batch size that was not timed is assumed to cost as much as one window with as many rows.
    double seconds(int width, int targets, int drafts, int batch = 1) const;
    double plan_seconds(const Plan& plan, int batch = 1) const {
        return seconds(plan.width(), plan.drafts + 1, plan.next().drafts, batch);
    }
};

// The plans to time: a few whose widths span those of a bundle with `lookahead` rows, since times are nearly linear in
// between.
std::vector<Plan> probe_plans(int lookahead, int batch = 1);

// Time passes of `plans`, `ar` among them, in alternation, and take the least time of each plan: disturbances only make
// a pass slower.
Curves measure(const std::function<PassSeconds(const Plan&)>& time, const std::vector<Plan>& plans);

}  // namespace pass
