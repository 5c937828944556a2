#include "decode/draft_policy.h"

#include <algorithm>

#include "errors.h"

namespace pass {

namespace {

Drafts first_of(const Drafts& drafts, int count) {
    const auto size = static_cast<std::ptrdiff_t>(drafts.size());
    return {drafts.begin(), drafts.begin() + std::min<std::ptrdiff_t>(count, size)};
}

// A pass that verifies n-gram drafts: one of their own if the cycle's next pass verifies fewer or none, and the policy
// wants it; else the cycle's, if it verifies drafts and the policy prefers n-grams there. None if neither holds.
std::optional<NextPass> with_ngrams(const Cycle& cycle, const Plan* window, std::int64_t room,
                                    const Capabilities& capabilities, const std::vector<DraftState>& states,
                                    DraftPolicy& policy) {
    const Plan* plan = cycle.plans.front().is_fused() ? &cycle.plans.front() : nullptr;
    if (window != nullptr && cycle.contains(*window) && window->drafts > 0) plan = window;
    if (plan != nullptr && capabilities.padded_width(plan->width()) > room) plan = nullptr;
    int longest = 0;
    for (const DraftState& state : states) longest = std::max(longest, static_cast<int>(state.ngram.size()));
    longest = std::min(longest, capabilities.lookahead.value_or(max_lookahead));
    if (plan == nullptr || longest > plan->depth()) {
        std::vector<Plan> plans;
        for (int count = 1; count <= longest; ++count) {
            Plan verify = capabilities.verify_plan(count);
            if (capabilities.padded_width(verify.width()) <= room) plans.push_back(std::move(verify));
        }
        if (const int count = policy.ngram_count(states, plan, plans); count > 0) {
            NextPass found{plans[static_cast<std::size_t>(count - 1)], {}};
            for (const DraftState& state : states) {
                found.drafts.push_back(state.ngram.empty() ? std::nullopt
                                                           : std::optional(first_of(state.ngram, count)));
            }
            return found;
        }
    }
    if (plan == nullptr) return std::nullopt;
    NextPass found{*plan, {}};
    bool any = false;
    for (const DraftState& state : states) {
        const bool taken = !state.ngram.empty() && policy.prefers_ngrams(state, *plan);
        found.drafts.push_back(taken ? std::optional(first_of(state.ngram, plan->depth())) : std::nullopt);
        any = any || taken;
    }
    return any ? std::optional(std::move(found)) : std::nullopt;
}

// A pass of the plan whose windows are on the device, or of the first plan of the cycle. If the windows of the cycle do
// not fit the room, or the backend cannot run them, a narrower cycle is taken; none if not even a plain pass fits.
std::optional<NextPass> from_cycle(Cycle cycle, const Plan* window, std::int64_t room, const Capabilities& capabilities,
                                   std::size_t count) {
    while (true) {
        for (const Plan* plan : {window, static_cast<const Plan*>(&cycle.plans.front())}) {
            const bool fits =
                plan != nullptr && cycle.contains(*plan) && capabilities.padded_width(cycle.reach(*plan)) <= room;
            if (fits && capabilities.allows(cycle.plans)) {
                return NextPass{*plan, std::vector<std::optional<Drafts>>(count)};
            }
        }
        if (cycle.lookahead() == 0) return std::nullopt;
        cycle = cycle.narrower();
    }
}

}  // namespace

std::optional<NextPass> next_pass(Cycle cycle, const Plan* window, std::int64_t room, const Capabilities& capabilities,
                                  const std::vector<DraftState>& states, DraftPolicy& policy) {
    if (std::any_of(states.begin(), states.end(), [](const DraftState& state) { return !state.ngram.empty(); })) {
        if (std::optional<NextPass> found = with_ngrams(cycle, window, room, capabilities, states, policy))
            return found;
    }
    return from_cycle(std::move(cycle), window, room, capabilities, states.size());
}

Mode make_mode(const std::string& plan, int lookahead, const std::optional<std::string>& draft,
               const std::vector<Tree>& trees) {
    if (plan == "auto" && lookahead > 0) {
        const std::string source = draft.value_or("both");
        return {"auto", std::nullopt, source == "ngram" ? 0 : lookahead, source == "lookahead" ? 0 : lookahead};
    }
    Cycle cycle = make_cycle(plan == "auto" ? "ar" : plan, lookahead, trees);
    const int drafts = cycle.lookahead();
    if (!draft || *draft == "lookahead" || lookahead == 0) {
        std::string name = cycle.name;
        return {std::move(name), std::move(cycle), drafts, 0};
    }
    if (plan == "ar") {
        throw Error("the plan ar takes no drafts, so --draft " + *draft +
                    " needs another one: two-pass, fused or auto");
    }
    if (*draft == "ngram") return {"ngram", make_cycle("ar", 0), 0, drafts};
    std::string name = cycle.name + "+ngram";
    return {std::move(name), std::move(cycle), drafts, drafts};
}

}  // namespace pass
