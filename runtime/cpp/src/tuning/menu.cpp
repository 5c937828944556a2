#include "tuning/menu.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <set>

namespace pass {

namespace {

// The drafts of two-pass and fused plans in the menu, which also has plans with L drafts.
constexpr std::array<int, 5> draft_counts{1, 2, 3, 4, 6};
// If the likeliest token is wrong: how often the second, third, ... is right, with SmolLM2-135M.
constexpr std::array<double, 5> later_choice_shares{0.30, 0.12, 0.07, 0.048, 0.036};
// The acceptance of a first choice after a second or later choice, relative to one after a first.
constexpr double after_later_ratio = 0.75;
constexpr int num_squarings = 9;  // after 2^9 windows the distribution is stationary

using Matrix = std::vector<std::vector<double>>;

Matrix squared(const Matrix& matrix) {
    const std::size_t size = matrix.size();
    Matrix result(size, std::vector<double>(size, 0.0));
    for (std::size_t i = 0; i < size; ++i) {
        for (std::size_t k = 0; k < size; ++k) {
            for (std::size_t j = 0; j < size; ++j) result[i][j] += matrix[i][k] * matrix[k][j];
        }
    }
    return result;
}

// The probability that each draft of a tree is accepted, in the order of its rows.
std::vector<double> tree_acceptance(const Tree& tree, const std::vector<double>& cumulative) {
    struct Row {
        double acceptance = 1.0;
        double ratio = 1.0;  // the product of after_later_ratio over the later choices on its path
        std::size_t depth = 0, children = 0;
    };
    std::vector<Row> rows{Row()};
    std::vector<double> result;
    for (const int parent : tree) {
        Row& parent_row = rows[static_cast<std::size_t>(parent)];
        Row row = parent_row;
        const double first_choice =  // the acceptance of the row's first choice
            row.ratio * (cumulative[row.depth + 1] / std::max(cumulative[row.depth], 1e-9));
        const std::size_t rank = std::min(parent_row.children++, later_choice_shares.size());
        row.acceptance *=
            rank > 0 ? later_choice_shares[rank - 1] * (1 - first_choice) : first_choice;
        row.ratio *= rank > 0 ? after_later_ratio : 1.0;
        row.depth += 1;
        row.children = 0;
        rows.push_back(row);
        result.push_back(row.acceptance);
    }
    return result;
}

// Groups that shrink from the tree's depth to one row along the first choices, which are the tree's
// first rows. Groups after later choices, which are seldom accepted, have one row.
std::vector<int> smaller_groups(const Tree& tree) {
    const int depth = tree_depth(tree);
    std::vector<int> groups(tree.size() + 1, 1);
    for (int row = 0; row < depth; ++row) groups[static_cast<std::size_t>(row)] = depth - row;
    return groups;
}

}  // namespace

std::vector<Cycle> menu(int depth, const Capabilities* capabilities) {
    if (capabilities != nullptr)
        depth = std::min(depth, capabilities->fixed_lookahead.value_or(depth));
    std::set<int> counts(draft_counts.begin(), draft_counts.end());
    counts.insert(depth);
    std::erase_if(counts, [&](int count) { return count < 1 || count > depth; });
    std::vector<Cycle> result{make_cycle("ar", 0)};
    const auto add = [&](Cycle cycle) {
        if (std::find(result.begin(), result.end(), cycle) == result.end())
            result.push_back(std::move(cycle));
    };
    for (const int count : counts) add(make_cycle("two-pass", count));
    for (const int count : counts) {
        std::vector<int> groups(static_cast<std::size_t>(count) + 1, 1);
        std::iota(groups.rbegin() + 1, groups.rend(), 1);
        add(fused_cycle(groups));
        add(fused_cycle(std::vector<int>(groups.size(), count)));
    }
    for (const std::vector<int>& groups : tile_groups) {
        if (static_cast<int>(groups.size()) <= depth + 1) add(fused_cycle(groups));
    }
    if (capabilities == nullptr) return result;
    for (const Tree& tree : capabilities->exact_trees()) {
        if (tree_depth(tree) > depth) continue;
        add(tree_cycle(tree_plan(tree, smaller_groups(tree))));
        add(tree_cycle(full_tree(tree)));
    }
    std::erase_if(result, [&](const Cycle& cycle) { return !capabilities->allows(cycle.plans); });
    return result;
}

double expected_tokens(const Cycle& cycle, const std::vector<double>& cumulative) {
    const Plan& plan = cycle.plans.front();
    if (!plan.is_fused()) {  // of the two passes of two-pass, one verifies drafts
        return 1 + std::accumulate(cumulative.begin() + 1, cumulative.begin() + 1 + cycle.depth(),
                                   0.0) /
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
    // the next drafts are groups[a] deep. Half of the chain's steps keep the state: that excludes
    // periods without changing the stationary distribution.
    const auto states = static_cast<std::size_t>(plan.depth()) + 1;
    Matrix transitions(states, std::vector<double>(states, 0.0));
    std::vector<double> drafts(states, 0.0);  // expected accepted drafts, by state
    for (std::size_t state = 0; state < states; ++state) {
        std::vector<double> last(depths.size());  // that a row is accepted, and no draft after it
        for (std::size_t row = 0; row < depths.size(); ++row) {
            last[row] = depths[row] <= static_cast<int>(state) ? accepted[row] : 0.0;
            if (row == 0) continue;
            drafts[state] += last[row];
            last[static_cast<std::size_t>(parents[row - 1])] -= last[row];
        }
        for (std::size_t row = 0; row < last.size(); ++row) {
            transitions[state][static_cast<std::size_t>(plan.groups[row])] +=
                std::max(last[row], 0.0) / 2;
        }
        transitions[state][state] += 0.5;
    }
    for (int i = 0; i < num_squarings; ++i) transitions = squared(transitions);
    return 1 + std::inner_product(drafts.begin(), drafts.end(), transitions[0].begin(), 0.0);
}

}  // namespace pass
