// Which pass is run next: chosen from the mode's cycle of plans, the n-gram drafts at hand, and the room in the KV
// cache.
//
// Pure functions of numbers. They cannot change the text, because a draft is kept only if it equals the model's
// choice.
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

// How a request is decoded: by the plans of `cycle` (none: by the fastest), with at most `lookahead` drafts from
// look-ahead rows and `ngram_drafts` drafts from prompt lookup. name: the name of this in statistics.
struct Mode {
    std::string name;
    std::optional<Cycle> cycle;
    int lookahead = 0;
    int ngram_drafts = 0;
};

using Drafts = std::vector<std::int64_t>;

// The drafts at hand for one sequence: `left` is how many the last pass left in its window, `ngram` what followed the
// newest earlier occurrence of its last `matched` tokens, and `ngrams` how often such drafts were accepted in it, by
// `matched`.
struct DraftState {
    int num_drafts = 0;
    Drafts ngram;
    int matched = 0;
    std::map<int, Acceptance>* ngrams = nullptr;
};

// The plan of a pass, and for every sequence the n-gram drafts to put into its window; none keeps the window as it is.
struct Pass {
    Plan plan;
    std::vector<std::optional<Drafts>> drafts;
};

// Decides whether n-gram drafts are worth verifying.
class DraftPolicy {
   public:
    virtual ~DraftPolicy() = default;
    // Whether the n-gram drafts of `state` are better than the drafts that its window of `plan` holds already.
    virtual bool prefers(const DraftState& state, const Plan& plan) = 0;
    // How many n-gram drafts to verify with a plan of their own, 0 for none; plans[i] verifies i + 1 of them. window: a
    // plan whose windows could take some of them anyway, so that another must be clearly better; null if there is
    // none.
    virtual int count(const std::vector<DraftState>& states, const Plan* window, const std::vector<Plan>& plans) = 0;
};

// Verifies every n-gram draft, for requests that name their plan.
class AlwaysDraft : public DraftPolicy {
   public:
    bool prefers(const DraftState&, const Plan&) override { return true; }
    int count(const std::vector<DraftState>&, const Plan* window, const std::vector<Plan>& plans) override {
        return window == nullptr ? static_cast<int>(plans.size()) : 0;
    }
};

// The next pass over the sequences of `states`; none if not even a plain pass fits. window: the plan whose windows
// are on the device, null if there is none. room: tokens that the KV cache can take after the longest sequence.
std::optional<Pass> next_pass(Cycle cycle, const Plan* window, std::int64_t room, const Capabilities& capabilities,
                              const std::vector<DraftState>& states, DraftPolicy& policy);

// `plan`, `lookahead` and `trees` as for `make_cycle`, or "auto"; `draft` is "lookahead", "ngram" or "both" (none: both
// for auto, else lookahead).
Mode make_mode(const std::string& plan, int lookahead, const std::optional<std::string>& draft,
               const std::vector<Tree>& trees);

}  // namespace pass
