// Plans: the static layout of a decoding window, and the cycles of plans that decoding runs.
//
// pass_runtime/bundle/plan.py explains them. Constants are computed here, in one place for all plans: a manifest lists
// those of full groups alone, and `auto` runs windows of other groups, prompts windows of any width. Which trees there
// are is in the manifest.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pass {

inline constexpr int max_lookahead = 16;

// A tree of drafts: the row that each of them follows, 0 for the root. Drafts that follow the same row are its first
// choice, its second one, and so on; the chain of first choices comes first.
using Tree = std::vector<int>;

// How many drafts the longest path of a tree has, which is the chain of first choices.
int tree_depth(const Tree& tree);

// A window has the root, `drafts` draft rows, and a look-ahead group for every entry of `groups`: group a has groups[a]
// rows and follows row a. The drafts are a chain, each following the row before it, or a tree, if `parents` has the
// row that each of them follows.
struct Plan {
    std::string name;
    int drafts = 0;
    std::vector<int> groups;
    Tree parents{};

    bool is_tree() const { return !parents.empty(); }
    int lookahead_rows() const;
    int width() const { return 1 + drafts + lookahead_rows(); }
    // The most drafts that a pass can accept.
    int depth() const;
    int max_emitted() const { return depth() + 1; }
    bool is_fused() const { return drafts > 0 && !groups.empty(); }
    // How deep the drafts are that a pass makes for the next one. last: the row of the last accepted draft.
    int next_drafts(int last) const { return groups.empty() ? 0 : groups[static_cast<std::size_t>(last)]; }
    // The plan of the window that the tail writes for the next pass.
    Plan next() const;
    // The name of its tail graphs, which fused plans with the same number of drafts share; so do trees.
    std::string tail() const { return is_fused() ? (is_tree() ? "tree-" : "fused-") + std::to_string(drafts) : name; }

    // Names are unique among plans.
    bool operator==(const Plan& other) const { return name == other.name; }
};

Plan ar_plan();
Plan draft_plan(int lookahead);
Plan verify_plan(int lookahead);
Plan prefill_plan(int width);
// Throws Error if there is no plan with these group sizes.
Plan fused_plan(const std::vector<int>& groups);
// The plan of a tree. Throws Error if these groups do not fit it.
Plan tree_plan(const Tree& tree, const std::vector<int>& groups);
// The one in which every group is as large as the tree is deep.
Plan full_tree(const Tree& tree);

// The constant inputs of a plan's graphs; a window has Q rows, of which A are look-ahead rows.
struct PlanConstants {
    std::vector<std::int64_t> row_position;    // [Q]
    std::vector<std::uint8_t> window_mask;     // [Q,Q], 0 or 1
    std::vector<std::int64_t> logit_rows;      // [Q]
    std::vector<std::int64_t> lookahead_rows;  // [A]
    std::vector<std::int64_t> draft_rows;      // [D+1,depth] of a fused plan, else empty
    std::vector<std::int64_t> lookahead_ids;   // [A]
};

PlanConstants constants_of(const Plan& plan, std::int64_t vocab_size);

// A decoding mode: its plans are run one after another, again and again.
struct Cycle {
    std::string name;
    std::vector<Plan> plans;

    int lookahead() const;
    bool is_tree() const { return plans.front().is_tree(); }
    bool contains(const Plan& plan) const;
    // How many tokens the passes from `first` to the end of the cycle write into the KV cache, when no draft is
    // accepted.
    int reach(const Plan& first) const;
    // The same mode with one draft less, down to `ar`. A tree becomes a chain first.
    Cycle narrower() const;

    bool operator==(const Cycle& other) const { return name == other.name && plans == other.plans; }
};

// mode: "ar", "two-pass", "fused", "tree-" with its number of drafts, or "fused:" or "tree:" with a size for every
// group, from which the number of drafts follows.
// lookahead: the drafts of the other modes, 0 for `ar`. trees: those that there are. Throws Error if there is no such
// mode.
Cycle make_cycle(const std::string& mode, int lookahead, const std::vector<Tree>& trees = {});
Cycle fused_cycle(const std::vector<int>& groups);
Cycle tree_cycle(Plan plan);

}  // namespace pass
