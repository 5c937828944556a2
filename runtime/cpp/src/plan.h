// Plans: the static layout of a decoding window, and the cycles of plans that decoding runs.
//
// As pass_runtime/bundle/plan.py, which describes them. A manifest lists the constants of its plans; those of other
// group sizes (`fused:2,1,1`) are computed here in the same way.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pass {

inline constexpr int max_lookahead = 16;

// The root, `drafts` chained draft rows, and one look-ahead group for every entry of `groups`: group a follows the
// first a drafts and has groups[a] rows.
struct Plan {
    std::string name;
    int drafts = 0;
    std::vector<int> groups;

    int lookahead_rows() const;
    int width() const { return 1 + drafts + lookahead_rows(); }
    int max_emitted() const { return drafts + 1; }
    bool is_fused() const { return drafts > 0 && !groups.empty(); }
    // Drafts that a pass leaves for the next one where `accepted` of its own were.
    int left(int accepted) const { return groups.empty() ? 0 : groups[static_cast<std::size_t>(accepted)]; }
    // The plan whose window its tail lays out.
    Plan next() const;
    // The name of its tail graphs: fused plans with equally many drafts share them.
    std::string tail() const { return is_fused() ? "fused-" + std::to_string(drafts) : name; }

    // Names are unique among plans.
    bool operator==(const Plan& other) const { return name == other.name; }
};

Plan ar_plan();
Plan draft_plan(int lookahead);
Plan verify_plan(int lookahead);
Plan prefill_plan(int width);
// Throws Error where the sizes are no plan.
Plan fused_plan(const std::vector<int>& groups);

// What the graphs of a plan are given in every pass: Q window rows, A of them look-ahead rows.
struct PlanConstants {
    std::vector<std::int64_t> row_position;    // [Q]
    std::vector<std::uint8_t> window_mask;     // [Q,Q], 0 or 1
    std::vector<std::int64_t> logit_rows;      // [Q]
    std::vector<std::int64_t> lookahead_rows;  // [A]
    std::vector<std::int64_t> draft_rows;      // [D+1,D] of a fused plan, else empty
    std::vector<std::int64_t> lookahead_ids;   // [A]
};

PlanConstants constants_of(const Plan& plan, std::int64_t vocab_size);

// A decoding mode: the plans that follow one another, then start again.
struct Cycle {
    std::string name;
    std::vector<Plan> plans;

    int lookahead() const;
    bool contains(const Plan& plan) const;
    // How far the passes from `first` to the end of a round write behind the root when no draft is accepted.
    int reach(const Plan& first) const;
    // The same mode with one draft less; `ar` in the end.
    Cycle narrower() const;

    bool operator==(const Cycle& other) const { return name == other.name && plans == other.plans; }
};

// `mode` is "ar", "two-pass", "fused", or "fused:" with a size for every group, which then decides the look-ahead by
// itself. Otherwise `lookahead` counts the drafts of a round. Throws Error where it is none of them.
Cycle make_cycle(const std::string& mode, int lookahead);
Cycle fused_cycle(const std::vector<int>& groups);

}  // namespace pass
