// Plans: the static layout of a decoding window. pass_runtime/bundle/plan.py explains them.
//
// A plan's constants are computed here, because the manifest lists them only for plans whose groups
// are full. Trees are read from the manifest.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pass {

inline constexpr int max_lookahead = 16;

// A tree of drafts: the row that each draft follows, 0 for the root. Drafts that follow the same
// row are the first, second, ... choice for the next token. The chain of first choices comes first.
using Tree = std::vector<int>;

// How many drafts the longest path of a tree has.
int tree_depth(const Tree& tree);

// A window layout: the root, `drafts` draft rows, and one look-ahead group for every entry of
// `groups`. Group a has groups[a] rows, which follow row a (the root or a draft). parents: the row
// that each draft of a tree follows; empty if the drafts are a chain.
struct Plan {
    std::string name;
    int drafts = 0;
    std::vector<int> groups;
    Tree parents{};

    bool is_tree() const { return !parents.empty(); }
    int lookahead_rows() const;
    int width() const { return 1 + drafts + lookahead_rows(); }
    // The most drafts that one pass can accept.
    int depth() const;
    int max_emitted() const { return depth() + 1; }
    bool is_fused() const { return drafts > 0 && !groups.empty(); }
    // How many drafts deep the next window is. last: the row of the last accepted draft, or 0.
    int next_draft_depth(int last) const {
        return groups.empty() ? 0 : groups[static_cast<std::size_t>(last)];
    }
    // The plan whose window the tail of this plan lays out.
    Plan next() const;
    // The name of its tail graphs, which fused plans (or trees) with equally many drafts share.
    std::string tail() const {
        return is_fused() ? (is_tree() ? "tree-" : "fused-") + std::to_string(drafts) : name;
    }

    // Plans with the same name are the same plan.
    bool operator==(const Plan& other) const { return name == other.name; }
};

Plan ar_plan();
Plan draft_plan(int lookahead);
Plan verify_plan(int lookahead);
Plan prefill_plan(int width);  // a prompt chunk, laid out like a root and a chain of drafts
// Throws Error if there is no plan with these group sizes.
Plan fused_plan(const std::vector<int>& groups);
// The plan of a tree. Throws Error if these groups do not fit it.
Plan tree_plan(const Tree& tree, const std::vector<int>& groups);
// The plan of a tree whose groups all have as many rows as the tree is deep.
Plan full_tree(const Tree& tree);

// The inputs of a plan's graphs that are the same in every pass. A window has Q rows, of which D
// are drafts and A are look-ahead rows; V is the vocabulary size.
struct PlanConstants {
    std::vector<std::int64_t> row_position;    // [Q] position of each row relative to the root's
    std::vector<std::uint8_t> window_mask;     // [Q,Q] 1 at (i, j) if row i sees row j
    std::vector<std::int64_t> logit_rows;      // [Q] the rows whose logits are computed: all rows
    std::vector<std::int64_t> lookahead_rows;  // [A] the look-ahead rows: the window's last A rows
    // [D+1,depth], empty unless fused. Entry (a, j) is row j of group a, 0 if there is no such row.
    std::vector<std::int64_t> draft_rows;
    std::vector<std::int64_t> lookahead_ids;  // [A] V+i for look-ahead embedding i
};

PlanConstants constants_of(const Plan& plan, std::int64_t vocab_size);

// The plans that the passes of a sequence use in turn.
struct Cycle {
    std::string name;
    std::vector<Plan> plans;

    // The most drafts that one pass can accept.
    int depth() const;
    bool is_tree() const { return plans.front().is_tree(); }
    bool contains(const Plan& plan) const;
    // How many cache entries, from the root's on, the passes from `first` to the cycle's end write
    // if no draft is accepted.
    int reach(const Plan& first) const;
    // The cycle with one draft less, or `ar`. A tree becomes a chain of the same depth.
    Cycle narrower() const;

    bool operator==(const Cycle& other) const { return name == other.name && plans == other.plans; }
};

// The cycle of `mode`: "ar", "two-pass", "fused", "tree-N", or "fused:" or "tree:" and the size of
// every group. lookahead: the number of drafts, or the greatest depth of a tree; 0 gives `ar`, and
// "fused:" ignores other values. trees: the bundle's. Throws Error if no mode or tree fits.
Cycle make_cycle(const std::string& mode, int lookahead, const std::vector<Tree>& trees = {});
Cycle fused_cycle(const std::vector<int>& groups);
Cycle tree_cycle(Plan plan);

}  // namespace pass
