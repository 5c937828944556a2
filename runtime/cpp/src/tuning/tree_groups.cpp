#include "tuning/tree_groups.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "bundle/tree.h"
#include "tuning/linear.h"

namespace pass {

namespace {

// Of the places where the first choice is wrong, the shares where the second, third, ... is right.
constexpr std::array<double, 5> later_choices{0.30, 0.12, 0.07, 0.048, 0.036};
// How often the first choice after a later one is right, relative to the first choice after a first one.
constexpr double after_later = 0.75;

// The depth of each row of the tree, the root's first.
std::vector<int> depths_of(const Plan& plan) {
    std::vector<int> depths{0};
    for (int parent : plan.parents) depths.push_back(depths[static_cast<std::size_t>(parent)] + 1);
    return depths;
}

// For every row, the probability that it is the last accepted one, where the window's drafts are at most `left` deep.
std::vector<double> last_rows(const Plan& plan, const std::vector<double>& probabilities, int left) {
    const std::vector<int> depths = depths_of(plan);
    std::vector<double> last{1.0};
    for (std::size_t i = 0; i < probabilities.size(); ++i) {
        last.push_back(depths[i + 1] <= left ? probabilities[i] : 0.0);
    }
    const std::vector<double> reached = last;
    for (std::size_t i = 0; i < plan.parents.size(); ++i) {
        last[static_cast<std::size_t>(plan.parents[i])] -= reached[i + 1];
    }
    for (double& chance : last) chance = std::max(chance, 0.0);
    return last;
}

}  // namespace

std::vector<double> draft_probabilities(int drafts, int lookahead, const std::vector<double>& rates) {
    std::vector<double> found;
    for (const std::vector<int>& node : tree_nodes(drafts, lookahead)) {
        double chance = 1.0, usual = 1.0;
        for (std::size_t depth = 0; depth < node.size(); ++depth) {
            const double first = usual * rates[depth];
            if (node[depth] == 0) {
                chance *= first;
            } else {
                chance *= later_choices[static_cast<std::size_t>(node[depth]) - 1] * (1 - first);
                usual *= after_later;
            }
        }
        found.push_back(chance);
    }
    return found;
}

// How deep the drafts of successive windows are is a Markov chain: a pass whose last accepted draft is in row a leaves
// drafts groups[a] deep. Its stationary distribution x solves x T = x.
double tree_tokens(const Plan& plan, const std::vector<int>& groups, const std::vector<double>& probabilities) {
    const std::vector<int> depths = depths_of(plan);
    const auto states = static_cast<std::size_t>(plan.depth()) + 1;
    Matrix rows(states, std::vector<double>(states + 1, 0.0));
    std::vector<double> accepted(states, 0.0);
    for (std::size_t before = 0; before < states; ++before) {
        const std::vector<double> last = last_rows(plan, probabilities, static_cast<int>(before));
        for (std::size_t row = 0; row < last.size(); ++row) {
            rows[static_cast<std::size_t>(groups[row])][before] += last[row];
            accepted[before] += last[row] * depths[row];
        }
        rows[before][before] -= 1.0;
    }
    rows.back().assign(states + 1, 1.0);  // one equation is redundant; the probabilities add up to one
    const std::vector<double> stationary = solve(std::move(rows));
    return 1 + std::inner_product(stationary.begin(), stationary.end(), accepted.begin(), 0.0);
}

std::vector<std::vector<int>> tree_groups(const Plan& plan, const std::vector<double>& probabilities) {
    const std::vector<int> depths = depths_of(plan);
    std::vector<double> deep(static_cast<std::size_t>(plan.depth()), 0.0);
    for (std::size_t i = 0; i < probabilities.size(); ++i) {
        deep[static_cast<std::size_t>(depths[i + 1]) - 1] += probabilities[i];
    }
    const std::vector<double> last = last_rows(plan, probabilities, plan.depth());
    struct Added {
        double value;
        std::size_t group;
    };
    std::vector<Added> order;
    for (std::size_t group = 0; group < last.size(); ++group) {
        for (std::size_t row = 0; row < deep.size(); ++row) {
            const bool first = group == 0 && row == 0;  // a tree has drafts after the root
            order.push_back({first ? std::numeric_limits<double>::infinity() : last[group] * deep[row], group});
        }
    }
    std::stable_sort(order.begin(), order.end(), [](const Added& a, const Added& b) { return a.value > b.value; });
    std::vector<std::vector<int>> found;
    std::vector<int> groups(last.size(), 0);
    for (const Added& added : order) {
        ++groups[added.group];
        found.push_back(groups);
    }
    return found;
}

std::optional<GroupChoice> best_tree(const TreeChoices& choices, const std::vector<double>& rates,
                                     const std::function<double(int, int)>& seconds, int max_width) {
    std::optional<GroupChoice> best;
    for (int drafts : choices.sizes) {
        const Plan plan = full_tree(drafts, choices.lookahead);
        std::vector<double> probabilities = draft_probabilities(drafts, choices.lookahead, rates);
        // Certainty would make the Markov chain reducible: no unique solution.
        for (double& chance : probabilities) chance = std::min(chance, 0.999);
        std::vector<std::vector<int>> tried{plan.groups};
        if (!choices.full) tried = tree_groups(plan, probabilities);
        for (std::vector<int>& groups : tried) {
            const int width = 1 + drafts + std::accumulate(groups.begin(), groups.end(), 0);
            if (width > max_width) continue;
            GroupChoice choice{std::move(groups), 0, seconds(width, drafts)};
            choice.tokens = tree_tokens(plan, choice.groups, probabilities);
            if (!best || choice.rate() > best->rate()) best = std::move(choice);
        }
    }
    return best;
}

}  // namespace pass
