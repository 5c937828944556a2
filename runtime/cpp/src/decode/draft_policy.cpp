#include "decode/draft_policy.h"

#include <algorithm>

#include "errors.h"

namespace pass {

namespace {

Drafts first_of(const Drafts& drafts, int count) {
    const auto size = static_cast<std::ptrdiff_t>(drafts.size());
    return {drafts.begin(), drafts.begin() + std::min<std::ptrdiff_t>(count, size)};
}

// The next plan of the cycle, if it verifies drafts and fits the room; else null.
const Plan* verifying_plan(const Situation& here) {
    const Plan* plan = &here.cycle.plans.front();
    if (here.staged_plan != nullptr && here.cycle.contains(*here.staged_plan) &&
        here.staged_plan->drafts > 0)
        plan = here.staged_plan;
    return plan->drafts > 0 && here.fits(plan->width()) ? plan : nullptr;
}

// The plans that verify 1, 2, ... n-gram drafts and fit the room.
std::vector<Plan> ngram_plans(const Situation& here, int longest) {
    std::vector<Plan> plans;
    for (int count = 1; count <= longest; ++count) {
        Plan verify = here.capabilities.verify_plan(count);
        if (here.fits(verify.width())) plans.push_back(std::move(verify));
    }
    return plans;
}

// A pass that verifies n-gram drafts; none if the policy wants none. Its plan is the next one of
// the cycle, or one that only verifies if the cycle's has no draft rows or no room, or if the
// policy wants more drafts than it holds.
std::optional<NextPass> with_ngrams(const Situation& here) {
    const Plan* plan = verifying_plan(here);
    int longest = 0;
    for (const DraftState& state : here.states)
        longest = std::max(longest, static_cast<int>(state.ngram.size()));
    longest = std::min(longest, here.capabilities.fixed_lookahead.value_or(max_lookahead));
    if (plan == nullptr || longest > plan->depth()) {
        const std::vector<Plan> plans = ngram_plans(here, longest);
        if (const int count = here.policy.ngram_count(here.states, plan, plans); count > 0) {
            NextPass result{plans[static_cast<std::size_t>(count - 1)], {}};
            for (const DraftState& state : here.states) {
                result.drafts.push_back(state.ngram.empty()
                                            ? std::nullopt
                                            : std::optional(first_of(state.ngram, count)));
            }
            return result;
        }
    }
    if (plan == nullptr) return std::nullopt;
    NextPass result{*plan, {}};
    bool any = false;
    for (const DraftState& state : here.states) {
        const bool taken = !state.ngram.empty() && here.policy.prefers_ngrams(state, *plan);
        result.drafts.push_back(taken ? std::optional(first_of(state.ngram, plan->depth()))
                                      : std::nullopt);
        any = any || taken;
    }
    return any ? std::optional(std::move(result)) : std::nullopt;
}

// A pass of the plan whose windows are on the device, or of the first plan of the cycle. If the
// windows of the cycle do not fit the room, or the backend cannot run them, a narrower cycle is
// used; none if not even a plain pass fits.
std::optional<NextPass> from_cycle(const Situation& here) {
    Cycle cycle = here.cycle;
    while (true) {
        for (const Plan* plan :
             {here.staged_plan, static_cast<const Plan*>(&cycle.plans.front())}) {
            const bool fits =
                plan != nullptr && cycle.contains(*plan) && here.fits(cycle.reach(*plan));
            if (fits && here.capabilities.allows(cycle.plans))
                return NextPass{*plan, std::vector<std::optional<Drafts>>(here.states.size())};
        }
        if (cycle.depth() == 0) return std::nullopt;
        cycle = cycle.narrower();
    }
}

}  // namespace

std::optional<NextPass> Situation::next_pass() const {
    if (std::any_of(states.begin(), states.end(),
                    [](const DraftState& state) { return !state.ngram.empty(); })) {
        if (std::optional<NextPass> found = with_ngrams(*this)) return found;
    }
    return from_cycle(*this);
}

DraftChoice choose_drafts(const std::string& mode, int lookahead,
                          const std::optional<std::string>& draft, const std::vector<Tree>& trees) {
    if (mode == "auto" && lookahead > 0) {
        const std::string source = draft.value_or("both");
        return {"auto", std::nullopt, source == "ngram" ? 0 : lookahead,
                source == "lookahead" ? 0 : lookahead};
    }
    Cycle cycle = make_cycle(mode == "auto" ? "ar" : mode, lookahead, trees);
    const int drafts = cycle.depth();
    if (!draft || *draft == "lookahead" || lookahead == 0) {
        std::string name = cycle.name;
        return {std::move(name), std::move(cycle), drafts, 0};
    }
    if (mode == "ar") {
        throw Error("the plan ar takes no drafts, so --draft " + *draft +
                    " needs another one: two-pass, fused or auto");
    }
    if (*draft == "ngram") return {"ngram", make_cycle("ar", 0), 0, drafts};
    std::string name = cycle.name + "+ngram";
    return {std::move(name), std::move(cycle), drafts, drafts};
}

}  // namespace pass
