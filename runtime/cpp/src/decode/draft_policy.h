// Chooses the next pass for the scheduler: a plan of the cycle, or one that verifies n-gram drafts.
//
// Nothing here can change the text: the model verifies every draft.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "backends/capabilities.h"
#include "bundle/plan.h"
#include "tuning/estimates.h"

namespace pass {

// How a request is decoded: the fields of the same names in `ResolvedRequest`.
struct DraftChoice {
    std::string mode;
    std::optional<Cycle> cycle;
    int lookahead_drafts = 0;
    int ngram_drafts = 0;
};

using Drafts = std::vector<std::int64_t>;

// The drafts that one sequence has for the next pass. num_drafts: how many drafts its staged window
// holds. ngram: n-gram drafts that could replace these, found by a match of `match_length` tokens.
// ngram_acceptance: how often this sequence accepts n-gram drafts, by the length of the match.
struct DraftState {
    int num_drafts = 0;
    Drafts ngram;
    int match_length = 0;
    std::map<int, ConditionalAcceptance>* ngram_acceptance = nullptr;
};

// A pass. drafts: for each sequence, n-gram drafts to put into its window; none: keep the window.
struct NextPass {
    Plan plan;
    std::vector<std::optional<Drafts>> drafts;
};

// Decides whether n-gram drafts are verified. The base class, for named plans, verifies them all.
class DraftPolicy {
   public:
    virtual ~DraftPolicy() = default;
    // Whether the n-gram drafts of a sequence should replace the drafts in its window of a plan.
    virtual bool prefers_ngrams(const DraftState&, const Plan&) { return true; }
    // How many n-gram drafts to verify in a pass that only verifies; 0: run no such pass. plans[i]
    // verifies i + 1. cycle_plan: the cycle's next plan if it can verify n-gram drafts, else null.
    virtual int ngram_count(const std::vector<DraftState>&, const Plan* cycle_plan,
                            const std::vector<Plan>& plans) {
        return cycle_plan == nullptr ? static_cast<int>(plans.size()) : 0;
    }
};

// What the choice of the next pass depends on. staged_plan: the plan whose windows are on the
// device; null if there is none. room: `Slots::room`, in tokens. states: one for each sequence.
struct Situation {
    Cycle cycle;
    const Plan* staged_plan;
    std::int64_t room;
    const Capabilities& capabilities;
    const std::vector<DraftState>& states;
    DraftPolicy& policy;

    // Whether there is room for a window of `width` rows.
    bool fits(int width) const { return capabilities.padded_width(width) <= room; }
    // The next pass; none if not even a plain one fits.
    std::optional<NextPass> next_pass() const;
};

// How to decode a request. mode: one of `make_cycle`, or "auto". lookahead, trees: as for
// `make_cycle`. draft: as in GenerateOptions. Throws Error if it adds n-gram drafts to `ar`.
DraftChoice choose_drafts(const std::string& mode, int lookahead,
                          const std::optional<std::string>& draft, const std::vector<Tree>& trees);

}  // namespace pass
