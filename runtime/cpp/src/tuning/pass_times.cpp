#include "tuning/pass_times.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

namespace pass {

namespace {

constexpr double agree = 1.1;  // once the two least times differ by less than this factor, no more are taken
constexpr int repeats = 4, wide_repeats = 2, wide = 8;  // how often a pass is timed, and one of more than `wide` rows
constexpr int widest = 64;                              // passes with more rows, of all slots together, are not timed

// Terms: a pass, a row, the adapter (of passes that make drafts), what a look-ahead row takes more than another; and of
// the tail: a pass, a sampled row or draft, and what a draft takes more. Before any pass was timed, their standard
// deviations are these times a plain pass, and those of steps are a share of trunks as wide.
constexpr std::array<double, 7> spreads{10.0, 1.0, 1.0, 0.1, 1.0, 0.3, 0.3};
constexpr double step_spread = 0.2;
constexpr std::size_t count = spreads.size(), tail = 4;
// How far passes are from what is expected of them, relative to that: at first; at least; an average over so many. A
// pass that is further away than `outlier` times that counts as one that is so far away.
constexpr double least_noise = 0.01, noise_memory = 16, outlier = 3;
constexpr double least_seconds = 1e-9;
// How much may change from pass to pass, in times of the noise: the speed of all passes, and the step of one width.
constexpr double drift = 1.0 / 8, step_drift = 1.0 / 48;

double dot(const std::valarray<double>& a, const std::valarray<double>& b) { return (a * b).sum(); }

// Whether the two least times of a pass (trunk and tail together) nearly agree.
bool settled(const std::vector<PassSeconds>& passes) {
    if (passes.size() < 2) return false;
    std::vector<double> sums;
    for (const PassSeconds& one : passes) sums.push_back(one.trunk + one.tail);
    std::sort(sums.begin(), sums.end());
    return sums[1] <= agree * sums[0];
}

}  // namespace

PassTimes::PassTimes(const TimedPasses& timed, const PassTimes* like) {
    const auto& [narrowest, first] = *timed.begin();
    const double plain = first.trunk + first.tail;
    if (like != nullptr) {
        rows_ = like->rows_;
        values_ = like->values_;
        covariance_ = like->covariance_;
        add_outer(1 / noise_);
        for (std::size_t i = tail; i < count; ++i) covariance_[i][i] += std::pow(plain / noise_, 2);
    } else {
        std::vector<double> spread;
        for (const double share : spreads) spread.push_back(share * plain);
        for (const auto& [shape, seconds] : timed) {
            if (!rows_.empty() && rows_.back() == shape.rows) continue;
            rows_.push_back(shape.rows);
            spread.push_back(step_spread * seconds.trunk);
        }
        values_.resize(spread.size());
        // Half of a plain pass is taken to be due to its rows: none looks free where one width alone was timed.
        values_[0] = plain / 2;
        values_[1] = plain / 2 / narrowest.rows;
        covariance_.assign(spread.size(), Values(spread.size()));
        for (std::size_t i = 0; i < spread.size(); ++i) covariance_[i][i] = std::pow(spread[i] / noise_, 2);
    }
    fit(timed);
}

void PassTimes::fit(const TimedPasses& timed) {
    const PassTimes before = *this;
    for (const auto& [shape, seconds] : timed) {
        const double total = seconds.trunk + seconds.tail;
        Values trunk = terms(shape) / total, sampling = trunk;
        for (std::size_t i = 0; i < trunk.size(); ++i) (i >= tail && i < count ? trunk : sampling)[i] = 0;
        correct(trunk, seconds.trunk / total - dot(trunk, values_));
        correct(sampling, seconds.tail / total - dot(sampling, values_));
    }
    const Values fitted = values_[std::slice(0, count, 1)];
    if (fitted.min() >= 0) return bound();
    *this = before;
    for (std::size_t i = 0; i < count; ++i) {
        if (fitted[i] >= 0) continue;
        values_[i] = 0;
        covariance_[i] = 0;
        for (Values& row : covariance_) row[i] = 0;
    }
    fit(timed);
}

double PassTimes::seconds(const PassShape& shape) const { return std::max(dot(terms(shape), bounded_), least_seconds); }

double PassTimes::doubt(const std::vector<PassShape>& shapes, const PassShape& other) const {
    Values first(values_.size());
    for (const PassShape& shape : shapes) first += terms(shape);
    const Values second = terms(other);
    const Values apart = first / dot(first, bounded_) - second / dot(second, bounded_);
    double variance = 0;
    for (std::size_t i = 0; i < apart.size(); ++i) variance += apart[i] * dot(covariance_[i], apart);
    return noise_ * std::sqrt(std::max(0.0, variance));
}

void PassTimes::record(const PassShape& shape, double seconds) {
    const Values all = terms(shape);
    const double expected = std::max(dot(all, values_), least_seconds), most = outlier * noise_;
    const double deviation = std::clamp(seconds / expected - 1, -most / (1 + most), most);
    const double variance = noise_ * noise_ + (deviation * deviation - noise_ * noise_) / noise_memory;
    noise_ = std::max(std::sqrt(variance), least_noise);
    add_outer(drift);
    for (std::size_t i = count; i < all.size(); ++i) covariance_[i][i] += std::pow(step_drift * expected * all[i], 2);
    correct(all / expected, deviation);
    bound();
}

PassTimes::Values PassTimes::terms(const PassShape& shape) const {
    const int drafting = shape.drafts > 0 ? 1 : 0, lookahead = drafting * (shape.rows - shape.sampled);
    const std::array<int, count> first{1,           shape.rows, drafting, lookahead, 1, shape.sampled + shape.drafts,
                                       shape.drafts};
    Values found(values_.size());
    std::copy(first.begin(), first.end(), std::begin(found));
    const auto above = std::lower_bound(rows_.begin(), rows_.end() - 1, shape.rows);
    const std::size_t at = count + static_cast<std::size_t>(above - rows_.begin());
    const bool between = above != rows_.begin() && shape.rows < *above;
    found[at] = between ? static_cast<double>(shape.rows - above[-1]) / (above[0] - above[-1]) : 1.0;
    if (between) found[at - 1] = 1 - found[at];
    return found;
}

void PassTimes::add_outer(double share) {
    for (std::size_t i = 0; i < values_.size(); ++i) covariance_[i] += share * share * values_[i] * values_;
}

void PassTimes::correct(const Values& terms, double deviation) {
    Values covariance(terms.size());
    for (std::size_t i = 0; i < terms.size(); ++i) covariance[i] = dot(covariance_[i], terms);
    const Values gain = covariance / (1 + dot(terms, covariance));
    values_ += gain * deviation;
    for (std::size_t i = 0; i < terms.size(); ++i) covariance_[i] -= gain[i] * covariance;
}

void PassTimes::bound() {
    for (std::size_t i = 0; i < count; ++i) values_[i] = std::max(values_[i], 0.0);
    bounded_ = values_;
    double trunk = 0;
    for (std::size_t i = 0; i < rows_.size(); ++i) {
        const double line = values_[0] + values_[1] * rows_[i];
        trunk = std::max({trunk, line + values_[count + i], line / 2});
        bounded_[count + i] = trunk - line;
    }
}

std::vector<Plan> probe_plans(int lookahead, int batch) {
    std::vector<Plan> plans{ar_plan()};
    const auto narrow = [&](const Plan& plan) { return plan.width() * batch <= widest || plan.width() == 1; };
    std::set<int> lengths;
    for (int length : {1, 4, lookahead}) {
        if (length <= lookahead) lengths.insert(length);
    }
    for (int length : lengths) {
        if (Plan plan = verify_plan(length); narrow(plan)) plans.push_back(std::move(plan));
    }
    for (int length : std::set{1, lookahead}) {
        if (Plan plan = draft_plan(length); narrow(plan)) plans.push_back(std::move(plan));
    }
    std::vector<Plan> fused;
    for (int length = 1; length <= lookahead; ++length) {
        Plan plan = fused_plan(std::vector<int>(static_cast<std::size_t>(length) + 1, length));
        if (plan.width() * batch <= widest) fused.push_back(std::move(plan));
    }
    if (!fused.empty()) {
        const Plan& middle = fused[(fused.size() - 1) / 2];
        plans.push_back(middle);
        if (!(middle == fused.back())) plans.push_back(fused.back());
    }
    return plans;
}

std::vector<PassSeconds> measure(const std::function<PassSeconds(const Plan&)>& time, const std::vector<Plan>& plans) {
    std::vector<std::vector<PassSeconds>> seconds(plans.size());
    for (int number = 0; number < repeats; ++number) {
        for (std::size_t i = 0; i < plans.size(); ++i) {
            const int most = plans[i].width() > wide ? wide_repeats : repeats;
            if (number < most && !settled(seconds[i])) seconds[i].push_back(time(plans[i]));
        }
    }
    std::vector<PassSeconds> found;
    for (const std::vector<PassSeconds>& passes : seconds) {
        PassSeconds& least = found.emplace_back(passes.front());
        for (const PassSeconds& one : passes) {
            least = {std::min(least.trunk, one.trunk), std::min(least.tail, one.tail)};
        }
    }
    return found;
}

}  // namespace pass
