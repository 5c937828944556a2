// The menu of `auto`: the cycles that it chooses from, and the tokens that their passes are expected to write. Pure
// arithmetic, as in pass_runtime/tuning/tuner.py.
#pragma once

#include <vector>

#include "backends/capabilities.h"
#include "bundle/plan.h"

namespace pass {

// Fused windows of 8 and of 16 rows: processors multiply by tiles of so many rows, and a row more takes another tile.
inline const std::vector<std::vector<int>> tiles{{2, 2, 1}, {3, 3, 3, 3}};

// Plain decoding, which comes first, and the cycles that are at most `lookahead` drafts deep. Fused plans and trees
// have full groups, or groups that get smaller with what was accepted, down to one row. able: the engines that there
// are; null has any plan but trees.
std::vector<Cycle> menu(int lookahead, const Capabilities* able = nullptr);

// The expected tokens per pass of one sequence, if drafts of different passes are independent. cumulative [L+1]: the
// probabilities that the first i drafts of a chain are all accepted.
double tokens_of(const Cycle& cycle, const std::vector<double>& cumulative);

}  // namespace pass
