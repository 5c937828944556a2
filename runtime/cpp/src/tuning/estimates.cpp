#include "tuning/estimates.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <set>

#include "tuning/menu.h"

namespace pass {

namespace {

constexpr double averaged_passes = 200.0;  // how many passes an acceptance rate is averaged over
// A pass is timed until its second shortest time is at most this many times its shortest.
constexpr double agreement_ratio = 1.1;
// The most timings of a pass, and of one over wide_window_rows, which is slow and seldom fastest.
constexpr int timed_runs = 4, timed_wide_runs = 2, wide_window_rows = 8;
constexpr int max_timed_rows = 64;  // of all slots; passes with more were fastest on no machine
// How many passes the moving averages of the slowness and of a shape's ratio span.
constexpr int slowness_passes = 4, ratio_passes = 32;
// A pass counts as at most so many times slower or faster than expected, as pauses do not repeat.
constexpr double max_ratio = 1.2;
constexpr double min_pass_seconds = 1e-9;

// Whether the two shortest times of a pass (trunk and tail together) agree.
bool times_agree(const std::vector<PassSeconds>& passes) {
    std::multiset<double> sums;
    for (const PassSeconds& pass : passes) sums.insert(pass.trunk + pass.tail);
    return sums.size() > 1 && *std::next(sums.begin()) <= agreement_ratio * *sums.begin();
}

}  // namespace

ConditionalAcceptance::ConditionalAcceptance(std::vector<double> prior, double weight)
    : prior_(std::move(prior)), trials_(prior_.size(), weight) {
    for (double rate : prior_) hits_.push_back(rate * weight);
}

std::vector<double> ConditionalAcceptance::rates() const {
    std::vector<double> result;
    for (std::size_t i = 0; i < hits_.size(); ++i) result.push_back(hits_[i] / trials_[i]);
    return result;
}

void ConditionalAcceptance::record(int drafted, int accepted) {
    drafted = std::min(drafted, static_cast<int>(prior_.size()));
    for (int i = 0; i < std::min(accepted + 1, drafted); ++i) {
        const auto at = static_cast<std::size_t>(i);
        hits_[at] = (hits_[at] + (i < accepted ? 1 : 0)) * (1 - 1 / averaged_passes);
        trials_[at] = (trials_[at] + 1) * (1 - 1 / averaged_passes);
    }
    // All drafts were accepted: one more would probably be accepted about as often as the last.
    const auto next = static_cast<std::size_t>(drafted);
    if (drafted > 0 && drafted == accepted && next < prior_.size())
        move_towards(next, hits_[next - 1] / trials_[next - 1], 1 / averaged_passes);
}

void ConditionalAcceptance::forget() {
    for (std::size_t i = 0; i < prior_.size(); ++i)
        move_towards(i, prior_[i], 1 / (8 * averaged_passes));
}

void ConditionalAcceptance::move_towards(std::size_t i, double rate, double share) {
    hits_[i] += (rate * trials_[i] - hits_[i]) * share;
}

std::vector<double> cumulative_acceptance(const std::vector<double>& rates) {
    std::vector<double> cumulative{1.0};
    for (double rate : rates) cumulative.push_back(cumulative.back() * rate);
    return cumulative;
}

Line::Line(std::map<int, double> points, bool flat) : points_(std::move(points)) {
    double highest = points_.begin()->second;
    for (auto& [x, y] : points_) y = highest = std::max(highest, y);
    if (flat || points_.size() < 2) return;
    const auto [end, last] = *points_.rbegin();
    for (const auto& [x, y] : {*points_.begin(), *std::next(points_.rbegin())})
        rise_ = std::max(rise_, (last - y) / (end - x));
}

double Line::operator()(int x) const {
    const auto above = points_.lower_bound(x);
    if (above == points_.begin()) return above->second;
    const auto& [from, low] = *std::prev(above);
    const double rise =
        above == points_.end() ? rise_ : (above->second - low) / (above->first - from);
    return low + rise * (x - from);
}

PassTimes::PassTimes(const TimedPasses& timed, const PassTimes* other_sampler) {
    TimedPasses plain = timed, drafting = timed;
    std::erase_if(plain, [](const auto& pass) { return pass.first.drafts > 0; });
    std::erase_if(drafting, [](const auto& pass) { return pass.first.drafts == 0; });
    if (other_sampler != nullptr) {
        *this = *other_sampler;
        passes_.clear();
        double measured = 0, expected = 0;
        for (const auto& [shape, seconds] : timed) {
            measured += seconds.trunk;
            expected += trunk_seconds(shape);
        }
        slowness_ = measured / expected;
    } else {
        max_rows_ = timed.rbegin()->first.rows;
        std::map<int, double> trunk, extra;
        for (const auto& [shape, seconds] : plain) trunk[shape.rows] = seconds.trunk;
        for (const auto& [shape, seconds] : drafting) {
            if (trunk.contains(shape.rows))
                extra[shape.rows] = std::max(seconds.trunk - trunk[shape.rows], 0.0);
        }
        if (!extra.empty()) adapter_ = Line(extra, true);
        std::map<int, double> without_extra;  // of drafting passes
        for (const auto& [shape, seconds] : drafting)
            without_extra[shape.rows] = seconds.trunk - adapter_(shape.rows);
        trunk.merge(without_extra);
        // Half of the only time counts as due to its rows: more rows must not look free.
        if (trunk.size() == 1) trunk.emplace(0, trunk.begin()->second / 2);
        trunk_ = Line(trunk);
    }
    std::map<int, double> tail, drafts{{0, 0.0}};
    for (const auto& [shape, seconds] : plain) tail[shape.sampled] = seconds.tail / slowness_;
    tail_ = Line(tail);
    for (const auto& [shape, seconds] : drafting)
        drafts[shape.drafts] = seconds.tail / slowness_ - tail_(shape.sampled);
    drafts_ = Line(drafts);
}

double PassTimes::trunk_seconds(const PassShape& shape) const {
    return trunk_(shape.rows) + (shape.drafts > 0 ? adapter_(shape.rows) : 0.0);
}

double PassTimes::seconds(const PassShape& shape) const {
    const double expected = trunk_seconds(shape) + (tail_(shape.sampled) + drafts_(shape.drafts));
    const auto ratio = ratios_.find(shape);
    return std::max(expected, min_pass_seconds) * (ratio == ratios_.end() ? 1.0 : ratio->second) *
           slowness_;
}

void PassTimes::record(const PassShape& shape, double seconds) {
    const double deviation =
        std::clamp(seconds / this->seconds(shape), 1 / max_ratio, max_ratio) - 1;
    const double change =
        1 + deviation / std::min(++passes_[shape] + slowness_passes - 1, ratio_passes);
    ratios_.try_emplace(shape, 1.0).first->second *= change;
    // The product of all ratios is kept at 1: what they have in common belongs to the slowness.
    const double mean = std::pow(change, 1.0 / static_cast<double>(ratios_.size()));
    for (auto& [other, ratio] : ratios_) ratio /= mean;
    // With its ratio, the estimate of this shape changes by 1 / slowness_passes of the deviation.
    slowness_ *= (1 + deviation / slowness_passes) / change * mean;
}

std::vector<Plan> probe_plans(int lookahead, int batch) {
    std::vector<Plan> result;
    const auto add = [&](const Plan& plan) {
        const bool may_be_timed = plan.width() * batch <= max_timed_rows || plan.width() == 1;
        if (may_be_timed && std::find(result.begin(), result.end(), plan) == result.end())
            result.push_back(plan);
    };
    add(ar_plan());
    // With many widths, one more length replaces the fused plan with 8 rows.
    for (const int length : lookahead > 5 ? std::set{1, 4, lookahead} : std::set{1, lookahead})
        add(verify_plan(length));
    for (const int length : {1, lookahead}) add(draft_plan(length));
    for (const std::vector<int>& groups : tile_groups) {
        const bool skipped = lookahead > 5 && groups != tile_groups.back();
        if (!skipped && static_cast<int>(groups.size()) <= lookahead + 1) add(fused_plan(groups));
    }
    for (int length = lookahead; length > 0; --length) {
        const Plan full =
            fused_plan(std::vector<int>(static_cast<std::size_t>(length) + 1, length));
        if (full.width() * batch > max_timed_rows) continue;
        add(full);
        break;
    }
    return result;
}

std::vector<PassSeconds> measure(const std::function<PassSeconds(const Plan&)>& time,
                                 const std::vector<Plan>& plans) {
    std::vector<std::vector<PassSeconds>> seconds(plans.size());
    for (int number = 0; number < timed_runs; ++number) {
        for (std::size_t i = 0; i < plans.size(); ++i) {
            const int runs = plans[i].width() > wide_window_rows ? timed_wide_runs : timed_runs;
            if (number < runs && !times_agree(seconds[i])) seconds[i].push_back(time(plans[i]));
        }
    }
    std::vector<PassSeconds> result;
    for (const std::vector<PassSeconds>& passes : seconds) {
        PassSeconds& least = result.emplace_back(passes.front());
        for (const PassSeconds& pass : passes)
            least = {std::min(least.trunk, pass.trunk), std::min(least.tail, pass.tail)};
    }
    return result;
}

}  // namespace pass
