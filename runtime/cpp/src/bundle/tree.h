// Trees of drafts: which later choices a tree has beside the chain of first ones. pass_runtime/bundle/tree.py explains
// them.
#pragma once

#include <vector>

namespace pass {

// The numbers of drafts in trees.
const std::vector<int>& every_tree_size();
// The sizes of the trees that a bundle with `lookahead` look-ahead rows may have.
std::vector<int> tree_sizes(int lookahead);
// How many drafts the longest path of a tree of `drafts` drafts has.
int tree_depth(int drafts);
// For each draft of a tree, in the order of its rows, the ranks of the choices on the way to it. The chain of first
// choices comes first. Throws Error where bundles with `lookahead` look-ahead rows have no such tree.
std::vector<std::vector<int>> tree_nodes(int drafts, int lookahead);
// The row that each draft of a tree follows, 0 for the root.
std::vector<int> tree_parents(int drafts, int lookahead);

}  // namespace pass
