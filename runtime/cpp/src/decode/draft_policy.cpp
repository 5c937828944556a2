#include "decode/draft_policy.h"

#include <algorithm>

#include "errors.h"

namespace pass {

namespace {

Drafts first_of(const Drafts& drafts, int count) {
    const auto size = static_cast<std::ptrdiff_t>(drafts.size());
    return {drafts.begin(), drafts.begin() + std::min<std::ptrdiff_t>(count, size)};
}

// The plan of the cycle that can verify n-gram drafts now: the staged plan, whose windows are on
// the device, if it has draft rows, else the cycle's first plan; null if that has none, or does
// not fit the entries left in the KV cache.
const Plan* verifying_plan(const Situation& situation) {
    const Plan* plan = &situation.cycle.plans.front();
    if (situation.staged_plan != nullptr && situation.cycle.contains(*situation.staged_plan) &&
        situation.staged_plan->drafts > 0)
        plan = situation.staged_plan;
    return plan->drafts > 0 && situation.fits(plan->width()) ? plan : nullptr;
}

// The plans that verify 1, 2, ... n-gram drafts and fit the KV cache.
std::vector<Plan> ngram_plans(const Situation& situation, int max_drafts) {
    std::vector<Plan> plans;
    for (int count = 1; count <= max_drafts; ++count) {
        Plan plan = situation.capabilities.verify_plan(count);
        if (situation.fits(plan.width())) plans.push_back(std::move(plan));
    }
    return plans;
}

// A pass that verifies n-gram drafts; none if the policy wants none. Its plan is that of
// `verifying_plan`, or a plan without look-ahead rows if there is none, or if it has fewer draft
// rows than the policy wants.
std::optional<NextPass> with_ngrams(const Situation& situation) {
    const Plan* plan = verifying_plan(situation);
    int max_drafts = 0;
    for (const DraftState& state : situation.states)
        max_drafts = std::max(max_drafts, static_cast<int>(state.ngram.size()));
    // Engines with a fixed look-ahead verify chains of at most that many drafts.
    max_drafts =
        std::min(max_drafts, situation.capabilities.fixed_lookahead.value_or(max_lookahead));
    if (plan == nullptr || max_drafts > plan->depth()) {
        const std::vector<Plan> plans = ngram_plans(situation, max_drafts);
        if (const int count = situation.policy.ngram_count(situation.states, plan, plans);
            count > 0) {
            NextPass result{plans[static_cast<std::size_t>(count - 1)], {}};
            for (const DraftState& state : situation.states) {
                result.drafts.push_back(state.ngram.empty()
                                            ? std::nullopt
                                            : std::optional(first_of(state.ngram, count)));
            }
            return result;
        }
    }
    if (plan == nullptr) return std::nullopt;
    NextPass result{*plan, {}};
    bool any_replaced = false;
    for (const DraftState& state : situation.states) {
        const bool replaced = !state.ngram.empty() && situation.policy.prefers_ngrams(state, *plan);
        result.drafts.push_back(replaced ? std::optional(first_of(state.ngram, plan->depth()))
                                         : std::nullopt);
        any_replaced = any_replaced || replaced;
    }
    return any_replaced ? std::optional(std::move(result)) : std::nullopt;
}

// A pass of the plan whose windows are on the device, or of the first plan of the cycle. If the
// passes up to the cycle's end do not fit the KV cache, or the backend cannot run all plans of the
// cycle, a narrower cycle is used; none if not even a plain pass fits.
std::optional<NextPass> from_cycle(const Situation& situation) {
    Cycle cycle = situation.cycle;
    while (true) {
        for (const Plan* plan :
             {situation.staged_plan, static_cast<const Plan*>(&cycle.plans.front())}) {
            const bool fits =
                plan != nullptr && cycle.contains(*plan) && situation.fits(cycle.reach(*plan));
            if (fits && situation.capabilities.allows(cycle.plans))
                return NextPass{*plan, std::vector<std::optional<Drafts>>(situation.states.size())};
        }
        if (cycle.depth() == 0) return std::nullopt;
        cycle = cycle.narrower();
    }
}

}  // namespace

std::optional<NextPass> Situation::next_pass() const {
    if (std::any_of(states.begin(), states.end(),
                    [](const DraftState& state) { return !state.ngram.empty(); })) {
        if (std::optional<NextPass> next = with_ngrams(*this)) return next;
    }
    return from_cycle(*this);
}

// The last two members of each result are the numbers of look-ahead and of n-gram drafts.
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
