#include "tuning/pass_times.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>

namespace pass {

namespace {

constexpr double agree = 1.1;  // once the two least times differ by less than this factor, no more are taken
constexpr int repeats = 4, wide_repeats = 2, wide = 8;  // how often a pass is timed, and one of more than `wide` rows
constexpr int widest = 64;                              // passes with more rows, of all slots together, are not timed

// Whether the two least times of a pass (trunk and tail together) nearly agree.
bool settled(const std::vector<PassSeconds>& passes) {
    if (passes.size() < 2) return false;
    std::vector<double> sums;
    for (const PassSeconds& one : passes) sums.push_back(one.trunk + one.tail);
    std::sort(sums.begin(), sums.end());
    return sums[1] <= agree * sums[0];
}

}  // namespace

double between(const Points& points, int at) {
    if (points.empty() || (points.size() == 1 && !points.contains(at))) {
        throw std::logic_error("times of passes over " + std::to_string(points.size()) +
                               " numbers of rows do not say how long one over " + std::to_string(at) + " takes");
    }
    const auto first = points.begin();
    const auto last = std::prev(points.end());
    if (at > last->first) {
        const double slope = (last->second - first->second) / (last->first - first->first);
        return last->second + (at - last->first) * std::max(0.0, slope);
    }
    const auto above = points.lower_bound(at);
    if (above == first || above->first == at) return above->second;
    const auto below = std::prev(above);
    const double share = static_cast<double>(at - below->first) / (above->first - below->first);
    return below->second + share * (above->second - below->second);
}

double Curves::seconds(int width, int targets, int drafts) const {
    if (drafts == 0) return between(trunk, width) + between(tail, targets);
    if (drafting.empty()) return lookahead_trunk(width) + between(tail, targets + drafts);
    const double plain =
        between(tail, 1);  // the tail without drafts, a second point for the line where `drafting` has only one
    Points line = drafting;
    line.emplace(0, plain);
    return lookahead_trunk(width) + between(line, drafts) + between(tail, targets) - plain;
}

double Curves::lookahead_trunk(int width) const {
    if (lookahead.size() > 1) return between(lookahead, width);
    double added = 0;
    for (const auto& [timed, seconds] : lookahead) added = std::max(added, seconds - between(trunk, timed));
    return between(trunk, width) + added;
}

PassTimes PassTimes::with_tail(const Curves& now) const {
    double slower = 0;
    for (const auto& [width, time] : now.trunk) slower += time / single.trunk.at(width);
    for (const auto& [width, time] : now.lookahead) slower += time / single.lookahead.at(width);
    slower /= static_cast<double>(now.trunk.size() + now.lookahead.size());
    PassTimes found{{single.trunk, now.tail, single.lookahead, now.drafting}, {}};
    for (auto& [width, time] : found.single.trunk) time *= slower;
    for (auto& [width, time] : found.single.lookahead) time *= slower;
    return found;
}

int PassTimes::max_width() const {
    const int widest_plain = single.trunk.rbegin()->first;
    return single.lookahead.empty() ? widest_plain : std::max(widest_plain, single.lookahead.rbegin()->first);
}

double PassTimes::seconds(int width, int targets, int drafts, int batch) const {
    const auto known = batched.find(batch);
    if (known != batched.end()) return known->second.seconds(width, targets, drafts);
    return single.seconds(batch * width, batch * targets, batch * drafts);
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

Curves measure(const std::function<PassSeconds(const Plan&)>& time, const std::vector<Plan>& plans) {
    std::vector<std::vector<PassSeconds>> seconds(plans.size());
    for (int number = 0; number < repeats; ++number) {
        for (std::size_t i = 0; i < plans.size(); ++i) {
            const int most = plans[i].width() > wide ? wide_repeats : repeats;
            if (number < most && !settled(seconds[i])) seconds[i].push_back(time(plans[i]));
        }
    }
    Curves found;
    for (std::size_t i = 0; i < plans.size(); ++i) {
        PassSeconds least = seconds[i].front();
        for (const PassSeconds& one : seconds[i]) {
            least = {std::min(least.trunk, one.trunk), std::min(least.tail, one.tail)};
        }
        const int drafts = plans[i].next().drafts;
        (drafts > 0 ? found.lookahead : found.trunk)[plans[i].width()] = least.trunk;
        if (plans[i].is_fused()) continue;  // whose tails draw several tokens and make drafts too
        (drafts > 0 ? found.drafting : found.tail)[drafts > 0 ? drafts : plans[i].width()] = least.tail;
    }
    return found;
}

}  // namespace pass
