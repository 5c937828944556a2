// The menu of `auto`: the cycles that it chooses from, and how many tokens their passes are
// expected to write. As in pass_runtime/tuning/tuner.py.
#pragma once

#include <vector>

#include "backends/capabilities.h"
#include "bundle/plan.h"

namespace pass {

// Group sizes of fused windows with 8 and 16 rows: processors multiply matrices in tiles of so many
// rows, and a window with one more row takes another tile.
inline const std::vector<std::vector<int>> tile_groups{{2, 2, 1}, {3, 3, 3, 3}};

// Plain decoding, which comes first, and the cycles that are at most `depth` drafts deep. Fused
// plans and trees have full groups, or groups that shrink with the depth of the row that they
// follow; fused plans also `tile_groups`. capabilities: null allows every plan but trees.
std::vector<Cycle> menu(int depth, const Capabilities* capabilities = nullptr);

// The tokens that a pass is expected to write in one sequence, if passes accept independently of
// each other. cumulative [L+1]: the probabilities that the first i drafts of a chain are accepted.
double expected_tokens(const Cycle& cycle, const std::vector<double>& cumulative);

}  // namespace pass
