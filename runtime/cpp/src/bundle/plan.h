// Plans: the static layout of a decoding window, and the cycles of plans that decoding runs.
//
// pass_runtime/bundle/plan.py explains them. A manifest lists their constants for other runtimes; this one computes
// them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pass {

inline constexpr int max_lookahead = 16;

// A window has the root, `drafts` draft rows, each of which follows the row before it, and a look-ahead group for every
// entry of `groups`: group a has groups[a] rows and follows the first a drafts.
struct Plan {
    std::string name;
    int drafts = 0;
    std::vector<int> groups;

    int lookahead_rows() const;
    int width() const { return 1 + drafts + lookahead_rows(); }
    int max_emitted() const { return drafts + 1; }
    bool is_fused() const { return drafts > 0 && !groups.empty(); }
    // How many drafts a pass makes for the next one when `accepted` of its own drafts were accepted.
    int left(int accepted) const { return groups.empty() ? 0 : groups[static_cast<std::size_t>(accepted)]; }
    // The plan of the window that the tail writes for the next pass.
    Plan next() const;
    // The name of its tail graphs, which fused plans with the same number of drafts share.
    std::string tail() const { return is_fused() ? "fused-" + std::to_string(drafts) : name; }

    // Names are unique among plans.
    bool operator==(const Plan& other) const { return name == other.name; }
};

Plan ar_plan();
Plan draft_plan(int lookahead);
Plan verify_plan(int lookahead);
Plan prefill_plan(int width);
// Throws Error where there is no plan with these group sizes.
Plan fused_plan(const std::vector<int>& groups);

// The constant inputs of a plan's graphs; a window has Q rows, of which A are look-ahead rows.
struct PlanConstants {
    std::vector<std::int64_t> row_position;    // [Q]
    std::vector<std::uint8_t> window_mask;     // [Q,Q], 0 or 1
    std::vector<std::int64_t> logit_rows;      // [Q]
    std::vector<std::int64_t> lookahead_rows;  // [A]
    std::vector<std::int64_t> draft_rows;      // [D+1,D] of a fused plan, else empty
    std::vector<std::int64_t> lookahead_ids;   // [A]
};

PlanConstants constants_of(const Plan& plan, std::int64_t vocab_size);

// A decoding mode: its plans are run one after another, again and again.
struct Cycle {
    std::string name;
    std::vector<Plan> plans;

    int lookahead() const;
    bool contains(const Plan& plan) const;
    // How many tokens the passes from `first` to the end of the cycle write into the KV cache, when no draft is
    // accepted.
    int reach(const Plan& first) const;
    // The same mode with one draft less, down to `ar`.
    Cycle narrower() const;

    bool operator==(const Cycle& other) const { return name == other.name && plans == other.plans; }
};

// mode: "ar", "two-pass", "fused", or "fused:" with a size for every group, from which the number of drafts follows.
// lookahead: the drafts of the other modes, 0 for `ar`. Throws Error where there is no such mode.
Cycle make_cycle(const std::string& mode, int lookahead);
Cycle fused_cycle(const std::vector<int>& groups);

// Every plan that a bundle with `lookahead` look-ahead rows has tails for, in the order of its manifest.
std::vector<Plan> bundle_plans(int lookahead);

}  // namespace pass
