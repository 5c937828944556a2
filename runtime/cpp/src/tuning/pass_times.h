// What a pass costs on this machine: a linear model, fitted to a few timed passes and corrected by every later one.
#pragma once

#include <compare>
#include <functional>
#include <map>
#include <valarray>
#include <vector>

#include "bundle/plan.h"
#include "decode/runner.h"

namespace pass {

// What the time of a pass depends on, for all slots together: rows of the windows, rows that tokens are sampled from,
// and drafts that are made.
struct PassShape {
    int rows = 0;
    int sampled = 0;
    int drafts = 0;

    auto operator<=>(const PassShape&) const = default;
};

inline PassShape shape_of(const Plan& plan, int batch = 1) {
    return {batch * plan.width(), batch * (plan.drafts + 1), batch * plan.next().drafts};
}

using TimedPasses = std::map<PassShape, PassSeconds>;

// Seconds of a pass: a sum of terms, and a step at each number of rows that was timed, which is how far the trunk is
// from the line there. Steps are interpolated in between.
//
// Terms and steps are estimated together by a Kalman filter. Timed passes fit them, and later ones correct them: what
// changes for all passes (a busy machine, a longer text) is followed fast, what changes for one width slowly.
class PassTimes {
   public:
    // like: the times for another sampler, which differ in the tail and, as the machine's speed may have changed, by a
    // factor. Few shapes need be timed then.
    explicit PassTimes(const TimedPasses& timed, const PassTimes* like = nullptr);

    // The seconds of one pass, which never fall with more rows.
    double seconds(const PassShape& shape) const;
    // The standard deviation of the mean time of `shapes` relative to that of `other`.
    double doubt(const std::vector<PassShape>& shapes, const PassShape& other) const;
    // Correct the estimate by a pass that took so long.
    void record(const PassShape& shape, double seconds);
    int max_rows() const { return rows_.back(); }

   private:
    using Values = std::valarray<double>;
    // How often a pass has each term, and what share of each step.
    Values terms(const PassShape& shape) const;
    // Take up timed passes one after another. A term that would be negative is fixed at zero.
    void fit(const TimedPasses& timed);
    // Doubt that the speed of all passes has changed, by this share.
    void add_outer(double share);
    // The sum of `terms`, relative to the time of a pass, is found to deviate by so much.
    void correct(const Values& terms, double deviation);
    // No term is negative, and the trunk takes no less time with more rows.
    void bound();

    std::vector<int> rows_;
    Values values_, bounded_;  // as estimated; as `bound` corrects them
    std::vector<Values> covariance_;
    double noise_ = 0.05;  // how far passes are from what is expected of them, relative to that
};

// The plans to time: a few whose widths span those of a bundle with `lookahead` rows, since times are nearly linear in
// between.
std::vector<Plan> probe_plans(int lookahead, int batch = 1);

// Time passes of `plans`, `ar` among them, in alternation, and take the least time of each plan: disturbances only make
// a pass slower.
std::vector<PassSeconds> measure(const std::function<PassSeconds(const Plan&)>& time, const std::vector<Plan>& plans);

}  // namespace pass
