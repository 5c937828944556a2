#include "tuning/menu.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <set>

namespace pass {

namespace {

// Numbers of drafts of the two-pass and fused plans in the menu, which also has plans with all L
// drafts.
constexpr std::array<int, 5> draft_counts{1, 2, 3, 4, 6};
// The probability that the second, third, ... likeliest token is right if the likeliest is wrong.
constexpr std::array<double, 5> later_choice_shares{0.30, 0.12, 0.07, 0.048, 0.036};
// The acceptance of a first choice that follows a second or later choice, relative to one that
// follows a first.
constexpr double after_later_ratio = 0.75;
// of a transition matrix: after 2^9 windows the distribution is stationary
constexpr int num_squarings = 9;

using Matrix = std::vector<std::vector<double>>;

Matrix squared(const Matrix& steps) {
    Matrix found(steps.size(), std::vector<double>(steps.size(), 0.0));
    for (std::size_t i = 0; i < steps.size(); ++i) {
        for (std::size_t k = 0; k < steps.size(); ++k) {
            for (std::size_t j = 0; j < steps.size(); ++j) found[i][j] += steps[i][k] * steps[k][j];
        }
    }
    return found;
}

// The probability that each draft of a tree is accepted, in the order of its rows.
std::vector<double> tree_acceptance(const Tree& tree, const std::vector<double>& cumulative) {
    struct Row {
        double chance = 1.0;  // of being accepted
        // the product of after_later_ratio over the later choices on the path to this row
        double usual = 1.0;
        std::size_t depth = 0, children = 0;
    };
    std::vector<Row> rows{Row()};
    std::vector<double> found;
    for (const int parent : tree) {
        Row& before = rows[static_cast<std::size_t>(parent)];
        Row row = before;
        const double first =
            row.usual * (cumulative[row.depth + 1] / std::max(cumulative[row.depth], 1e-9));
        const std::size_t rank = std::min(before.children++, later_choice_shares.size());
        row.chance *= rank > 0 ? later_choice_shares[rank - 1] * (1 - first) : first;
        row.usual *= rank > 0 ? after_later_ratio : 1.0;
        row.depth += 1;
        row.children = 0;
        rows.push_back(row);
        found.push_back(row.chance);
    }
    return found;
}

// Groups that get smaller with the depth of the row that they follow. A group that follows a row
// off the chain of first choices has one row.
std::vector<int> smaller_groups(const Tree& tree) {
    const int depth = tree_depth(tree);
    std::vector<int> groups(tree.size() + 1, 1);
    for (int row = 0; row < depth; ++row) groups[static_cast<std::size_t>(row)] = depth - row;
    return groups;
}

}  // namespace

std::vector<Cycle> menu(int lookahead, const Capabilities* capabilities) {
    if (capabilities != nullptr)
        lookahead = std::min(lookahead, capabilities->lookahead.value_or(lookahead));
    std::set<int> counts(draft_counts.begin(), draft_counts.end());
    counts.insert(lookahead);
    std::erase_if(counts, [&](int count) { return count < 1 || count > lookahead; });
    std::vector<Cycle> found{make_cycle("ar", 0)};
    const auto add = [&](Cycle cycle) {
        if (std::find(found.begin(), found.end(), cycle) == found.end())
            found.push_back(std::move(cycle));
    };
    for (const int count : counts) add(make_cycle("two-pass", count));
    for (const int count : counts) {
        std::vector<int> groups(static_cast<std::size_t>(count) + 1, 1);
        std::iota(groups.rbegin() + 1, groups.rend(), 1);
        add(fused_cycle(groups));
        add(fused_cycle(std::vector<int>(groups.size(), count)));
    }
    for (const std::vector<int>& groups : tile_groups) {
        if (static_cast<int>(groups.size()) <= lookahead + 1) add(fused_cycle(groups));
    }
    if (capabilities == nullptr) return found;
    for (const Tree& tree : capabilities->exact_trees()) {
        if (tree_depth(tree) > lookahead) continue;
        add(tree_cycle(tree_plan(tree, smaller_groups(tree))));
        add(tree_cycle(full_tree(tree)));
    }
    std::erase_if(found, [&](const Cycle& cycle) { return !capabilities->allows(cycle.plans); });
    return found;
}

double expected_tokens(const Cycle& cycle, const std::vector<double>& cumulative) {
    const Plan& plan = cycle.plans.front();
    if (!plan.is_fused()) {
        return 1 + std::accumulate(cumulative.begin() + 1,
                                   cumulative.begin() + 1 + cycle.lookahead(), 0.0) /
                       2;
    }
    std::vector<double> accepted =
        plan.is_tree() ? tree_acceptance(plan.parents, cumulative) : cumulative;
    if (plan.is_tree()) accepted.insert(accepted.begin(), 1.0);
    std::vector<int> parents = plan.parents;
    for (int row = 0; !plan.is_tree() && row < plan.drafts; ++row) parents.push_back(row);
    std::vector<int> depths{0};
    for (const int parent : parents) depths.push_back(depths[static_cast<std::size_t>(parent)] + 1);

    // The depth of a window's drafts is the state of a Markov chain: if row a was accepted last,
    // the next drafts are groups[a] deep. Half of the chain's steps keep the state, which does not
    // change the stationary distribution, but excludes periods.
    const auto states = static_cast<std::size_t>(plan.depth()) + 1;
    Matrix steps(states, std::vector<double>(states, 0.0));
    // expected accepted drafts of a window, by the depth of its drafts
    std::vector<double> drafts(states, 0.0);
    for (std::size_t deep = 0; deep < states; ++deep) {
        // the probability that a row is the last accepted one
        std::vector<double> last(depths.size());
        for (std::size_t row = 0; row < depths.size(); ++row) {
            last[row] = depths[row] <= static_cast<int>(deep) ? accepted[row] : 0.0;
            if (row == 0) continue;
            drafts[deep] += last[row];
            last[static_cast<std::size_t>(parents[row - 1])] -= last[row];
        }
        for (std::size_t row = 0; row < last.size(); ++row) {
            steps[deep][static_cast<std::size_t>(plan.groups[row])] += std::max(last[row], 0.0) / 2;
        }
        steps[deep][deep] += 0.5;
    }
    for (int i = 0; i < num_squarings; ++i) steps = squared(steps);
    return 1 + std::inner_product(drafts.begin(), drafts.end(), steps[0].begin(), 0.0);
}

}  // namespace pass
