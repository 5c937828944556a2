#include "bundle/tree.h"

#include <algorithm>
#include <string>

#include "errors.h"

namespace pass {

namespace {

using Node = std::vector<int>;

// Drafts, those that are accepted most often first.
const std::vector<Node>& tree() {
    static const std::vector<Node> nodes{{0},       {0, 0},    {1}, {0, 0, 0}, {0, 1}, {0, 0, 0, 0}, {2}, {1, 0},
                                         {0, 0, 1}, {0, 1, 0}, {3}, {0, 2},    {4},    {0, 0, 0, 1}, {5}, {1, 1}};
    return nodes;
}

bool is_first_choice(const Node& node) {
    return std::all_of(node.begin(), node.end(), [](int rank) { return rank == 0; });
}

}  // namespace

const std::vector<int>& every_tree_size() {
    static const std::vector<int> sizes{3, 5, 8, 16};
    return sizes;
}

std::vector<int> tree_sizes(int lookahead) {
    std::vector<int> found = every_tree_size();
    std::erase_if(found, [&](int size) { return tree_depth(size) > lookahead; });
    return found;
}

int tree_depth(int drafts) {
    std::size_t depth = 0;
    for (int i = 0; i < drafts; ++i) depth = std::max(depth, tree()[static_cast<std::size_t>(i)].size());
    return static_cast<int>(depth);
}

std::vector<std::vector<int>> tree_nodes(int drafts, int lookahead) {
    const std::vector<int>& sizes = every_tree_size();
    if (std::find(sizes.begin(), sizes.end(), drafts) == sizes.end()) {
        std::string known;
        for (int size : sizes) known += (known.empty() ? "" : ", ") + std::to_string(size);
        throw Error("no tree has " + std::to_string(drafts) + " drafts: trees have " + known);
    }
    if (const int depth = tree_depth(drafts); depth > lookahead) {
        throw Error("a tree of " + std::to_string(drafts) + " drafts needs a look-ahead of " + std::to_string(depth) +
                    " or more, not " + std::to_string(lookahead));
    }
    std::vector<Node> nodes(tree().begin(), tree().begin() + drafts);
    std::stable_partition(nodes.begin(), nodes.end(), is_first_choice);
    return nodes;
}

std::vector<int> tree_parents(int drafts, int lookahead) {
    const std::vector<Node> nodes = tree_nodes(drafts, lookahead);
    std::vector<int> parents;
    for (const Node& node : nodes) {
        const Node before(node.begin(), node.end() - 1);
        const auto parent = std::find(nodes.begin(), nodes.end(), before);
        parents.push_back(before.empty() ? 0 : static_cast<int>(parent - nodes.begin()) + 1);
    }
    return parents;
}

}  // namespace pass
