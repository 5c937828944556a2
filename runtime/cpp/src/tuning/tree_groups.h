// The expected tokens per pass of trees of drafts, and the group sizes that decode fastest. Pure arithmetic, as
// pass_runtime/tuning/tree_groups.py explains it.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "bundle/plan.h"
#include "tuning/group_sizes.h"

namespace pass {

// How likely each draft of a tree is accepted, in the order of its rows. rates: the conditional acceptance of first
// choices, by depth.
std::vector<double> draft_probabilities(int drafts, int lookahead, const std::vector<double>& rates);

// Mean tokens per pass of a tree with these groups, in place of those of `plan`.
double tree_tokens(const Plan& plan, const std::vector<int>& groups, const std::vector<double>& probabilities);

// Group sizes with 1, 2, ... look-ahead rows in all, each with the rows that promise the most.
std::vector<std::vector<int>> tree_groups(const Plan& plan, const std::vector<double>& probabilities);

// Which trees to try: their numbers of drafts, for bundles with `lookahead` look-ahead rows. full: with full groups
// only.
struct TreeChoices {
    std::vector<int> sizes;
    int lookahead = 0;
    bool full = false;
};

// The tree with the most tokens per second; none where all have more than `max_width` rows. rates: as for
// `draft_probabilities`. seconds(width, drafts): the time of a pass.
std::optional<GroupChoice> best_tree(const TreeChoices& choices, const std::vector<double>& rates,
                                     const std::function<double(int, int)>& seconds, int max_width);

}  // namespace pass
