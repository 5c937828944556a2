// Which pass comes next: a mode's cycle of plans, drafts found in the text, and whatever still fits the KV cache.
//
// Pure functions of numbers. Nothing here can change the text: drafts are only compared with what the model chooses.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "capabilities.h"
#include "plan.h"

namespace pass {

// How a request is decoded: `cycle` (none: whatever is fastest), at most `lookahead` drafts from look-ahead rows and
// `text_drafts` from the text. name: as statistics call it.
struct Mode {
    std::string name;
    std::optional<Cycle> cycle;
    int lookahead = 0;
    int text_drafts = 0;
};

using Drafts = std::vector<std::int64_t>;

// What is known of one sequence: the drafts that the last pass `left` in its window, and what followed the last time in
// the `text`, after `matched` tokens that agree.
struct View {
    int left = 0;
    Drafts text;
    int matched = 0;
};

// A plan, and drafts from the text for every sequence; none leaves its window as the last pass left it.
struct Pass {
    Plan plan;
    std::vector<std::optional<Drafts>> drafts;
};

// Whether drafts from the text are worth their pass.
class Judge {
   public:
    virtual ~Judge() = default;
    // Whether its text drafts are better than those in its window of `plan`.
    virtual bool prefers(const View& view, const Plan& plan) = 0;
    // How many text drafts to verify now; plans[i] would verify i + 1 of them. 0 for none. window: a plan that takes
    // some of them too, so that others must be clearly better; null where there is none.
    virtual int count(const std::vector<View>& views, const Plan* window, const std::vector<Plan>& plans) = 0;
};

// What a match proposes is always tried.
class Always : public Judge {
   public:
    bool prefers(const View&, const Plan&) override { return true; }
    int count(const std::vector<View>&, const Plan* window, const std::vector<Plan>& plans) override {
        return window == nullptr ? static_cast<int>(plans.size()) : 0;
    }
};

// The next pass over the sequences of `views`, none where not even a plain one fits. window: the plan whose windows are
// in place, null where there is none. room: cache columns behind the longest sequence.
std::optional<Pass> next_pass(Cycle cycle, const Plan* window, std::int64_t room, const Capabilities& capabilities,
                              const std::vector<View>& views, Judge& judge);

// `plan` and `lookahead` as for `make_cycle`, or "auto"; `draft` is "lookahead", "ngram" or "both" (none: both for
// auto, else lookahead).
Mode make_mode(const std::string& plan, int lookahead, const std::optional<std::string>& draft);

}  // namespace pass
