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

Points means(const std::map<int, std::vector<double>>& seconds) {
    Points found;
    for (const auto& [rows, times] : seconds) {
        double sum = 0;
        for (double time : times) sum += time;
        found[rows] = sum / static_cast<double>(times.size());
    }
    return found;
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

PassTimes PassTimes::with_tail(const Points& some_trunk, Points other_tail) const {
    double slower = 0;
    for (const auto& [width, time] : some_trunk) slower += time / trunk.at(width);
    slower /= static_cast<double>(some_trunk.size());
    PassTimes found{trunk, std::move(other_tail), {}};
    for (auto& [width, time] : found.trunk) time *= slower;
    return found;
}

double PassTimes::seconds(int width, int sampled_rows, int batch) const {
    const auto points = batched.find(batch);
    const double first = points == batched.end() ? between(trunk, batch * width) : between(points->second, width);
    return first + between(tail, batch * sampled_rows);
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
    if (Plan plan = draft_plan(lookahead); narrow(plan)) plans.push_back(std::move(plan));
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

std::pair<Points, Points> measure(const std::function<PassSeconds(const Plan&)>& time, const std::vector<Plan>& plans) {
    std::vector<std::vector<PassSeconds>> seconds(plans.size());
    for (int number = 0; number < repeats; ++number) {
        for (std::size_t i = 0; i < plans.size(); ++i) {
            const int most = plans[i].width() > wide ? wide_repeats : repeats;
            if (number < most && !settled(seconds[i])) seconds[i].push_back(time(plans[i]));
        }
    }
    std::map<int, std::vector<double>> trunk, tail;
    for (std::size_t i = 0; i < plans.size(); ++i) {
        PassSeconds least = seconds[i].front();
        for (const PassSeconds& one : seconds[i]) {
            least = {std::min(least.trunk, one.trunk), std::min(least.tail, one.tail)};
        }
        trunk[plans[i].width()].push_back(least.trunk);
        tail[plans[i].sampled_rows()].push_back(least.tail);
    }
    return {means(trunk), means(tail)};
}

}  // namespace pass
