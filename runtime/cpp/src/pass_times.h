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

// Seconds of a pass, linear between the points and beyond them. Passes that draft have curves of their own: an
// adapter's nodes cost the same for one look-ahead row as for many, and a draft head runs once for every draft. Without
// them, such passes are taken for others of as many rows.
struct Curves {
    Points trunk;      // by window width, without look-ahead rows
    Points tail;       // by rows that target tokens are drawn from, where no drafts are made
    Points lookahead;  // the trunk by window width, with look-ahead rows
    Points drafting;   // the tail by drafts that it makes, behind one target token

    // `targets` rows of a window are drawn from, and `drafts` made for the next one.
    double seconds(int width, int targets, int drafts) const;
};

// Of one slot, and by rows of each slot for the other batch sizes that were measured.
struct PassTimes {
    Curves single;
    std::map<int, Curves> batched;

    // For another tail, whose passes were timed at fewer widths: the trunk as it was, times what it takes longer there.
    PassTimes with_tail(const Curves& now) const;
    int max_width() const;
    // A batch that nobody measured is taken for a window of as many rows.
    double seconds(int width, int targets, int drafts, int batch = 1) const;
    double plan_seconds(const Plan& plan, int batch = 1) const {
        return seconds(plan.width(), plan.drafts + 1, plan.next().drafts, batch);
    }
};

// Plans that together show widths from 1 to the widest a bundle with `lookahead` rows has: few of them, since pass
// times are nearly linear in between.
std::vector<Plan> probe_plans(int lookahead, int batch = 1);

// Time passes over `plans`, `ar` among them, in alternation. Of each plan it is the least, since whatever disturbs a
// pass only makes it slower.
Curves measure(const std::function<PassSeconds(const Plan&)>& time, const std::vector<Plan>& plans);

}  // namespace pass
