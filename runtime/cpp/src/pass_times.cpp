#include "pass_times.h"

#include <algorithm>
#include <iterator>
#include <set>

namespace pass {

namespace {

constexpr double agree = 1.1;                           // two times of a pass that differ by less are enough
constexpr int repeats = 4, wide_repeats = 2, wide = 8;  // times of a pass, and of one over more than `wide` rows
constexpr int widest = 64;  // windows with more rows, of all slots together, are not measured

// Whether the two least times of a pass, of trunk and tail together, are nearly alike.
bool settled(const std::vector<PassSeconds>& passes) {
    if (passes.size() < 2) return false;
    std::vector<double> sums;
    for (const PassSeconds& one : passes) sums.push_back(one.trunk + one.tail);
    std::sort(sums.begin(), sums.end());
    return sums[1] <= agree * sums[0];
}

}  // namespace

double between(const Points& points, int at) {
    const auto first = points.begin();
    const auto last = std::prev(points.end());
    if (at > last->first && last->first > first->first) {
        return last->second + (at - last->first) * (last->second - first->second) / (last->first - first->first);
    }
    const auto above = points.lower_bound(at);
    if (above == points.end()) return last->second;
    if (above == first || above->first == at) return above->second;
    const auto below = std::prev(above);
    const double share = static_cast<double>(at - below->first) / (above->first - below->first);
    return below->second + share * (above->second - below->second);
}

double Curves::seconds(int width, int targets, int drafts) const {
    const double first = between(drafts > 0 && !lookahead.empty() ? lookahead : trunk, width);
    if (drafts == 0) return first + between(tail, targets);
    if (drafting.empty()) return first + between(tail, targets + drafts);
    return first + between(drafting, drafts) + between(tail, targets) - between(tail, 1);
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
        if (plans[i].is_fused()) continue;  // whose tails draw several targets and make drafts too
        (drafts > 0 ? found.drafting : found.tail)[drafts > 0 ? drafts : plans[i].width()] = least.tail;
    }
    return found;
}

}  // namespace pass
