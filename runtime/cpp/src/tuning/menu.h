// The menu of `auto`: the cycles that it chooses from, and the tokens that their passes are
// expected to write. As in pass_runtime/tuning/tuner.py.
#pragma once

#include <vector>

#include "backends/capabilities.h"
#include "bundle/plan.h"

namespace pass {

// Group sizes of the fused windows with 8 and 16 rows: CPUs and GPUs multiply matrices in tiles of
// so many rows, and one more row takes another tile.
inline const std::vector<std::vector<int>> tile_groups{{2, 2, 1}, {3, 3, 3, 3}};

// Plain decoding, which comes first, and the cycles that are at most `lookahead` drafts deep. Fused
// plans and trees have full groups, or groups that get smaller with the depth of the row that they
// follow, down to one row; fused plans also have the groups of `tile_groups`. capabilities: those
// of the engines; null allows every plan but trees.
std::vector<Cycle> menu(int lookahead, const Capabilities* capabilities = nullptr);

// The expected tokens per pass of one sequence, if acceptance is independent from pass to pass.
// cumulative [L+1]: the probabilities that the first i drafts of a chain are all accepted, from i =
// 0 on.
double expected_tokens(const Cycle& cycle, const std::vector<double>& cumulative);

}  // namespace pass
