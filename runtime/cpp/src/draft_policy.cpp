#include "draft_policy.h"

#include <algorithm>

#include "errors.h"

namespace pass {

namespace {

Drafts first_of(const Drafts& text, int count) {
    return {text.begin(), text.begin() + std::min<std::ptrdiff_t>(count, static_cast<std::ptrdiff_t>(text.size()))};
}

// Text drafts in the window that has drafts anyway, unless more of them promise more; else in a window of their number
// in place of the cycle's next.
std::optional<Pass> from_text(const Cycle& cycle, const Plan* window, std::int64_t room,
                              const Capabilities& capabilities, const std::vector<View>& views, Judge& judge) {
    const Plan* plan = cycle.plans.front().is_fused() ? &cycle.plans.front() : nullptr;
    if (window != nullptr && cycle.contains(*window) && window->drafts > 0) plan = window;
    if (plan != nullptr && capabilities.columns(plan->width()) > room) plan = nullptr;
    int longest = 0;
    for (const View& view : views) longest = std::max(longest, static_cast<int>(view.text.size()));
    longest = std::min(longest, capabilities.lookahead.value_or(max_lookahead));
    if (plan == nullptr || longest > plan->drafts) {
        std::vector<Plan> plans;
        for (int count = 1; count <= longest; ++count) {
            Plan chain = capabilities.verifying(count);
            if (capabilities.columns(chain.width()) <= room) plans.push_back(std::move(chain));
        }
        if (const int count = judge.count(views, plan, plans); count > 0) {
            Pass found{plans[static_cast<std::size_t>(count - 1)], {}};
            for (const View& view : views) {
                found.drafts.push_back(view.text.empty() ? std::nullopt : std::optional(first_of(view.text, count)));
            }
            return found;
        }
    }
    if (plan == nullptr) return std::nullopt;
    Pass found{*plan, {}};
    bool any = false;
    for (const View& view : views) {
        const bool taken = !view.text.empty() && judge.prefers(view, *plan);
        found.drafts.push_back(taken ? std::optional(first_of(view.text, plan->drafts)) : std::nullopt);
        any = any || taken;
    }
    return any ? std::optional(std::move(found)) : std::nullopt;
}

// The windows in place, or the start of the cycle; near the end of the capacity those of a narrower cycle.
std::optional<Pass> from_cycle(Cycle cycle, const Plan* window, std::int64_t room, const Capabilities& capabilities,
                               std::size_t count) {
    while (true) {
        for (const Plan* plan : {window, static_cast<const Plan*>(&cycle.plans.front())}) {
            const bool fits =
                plan != nullptr && cycle.contains(*plan) && capabilities.columns(cycle.reach(*plan)) <= room;
            if (fits && capabilities.allows(cycle.plans)) {
                return Pass{*plan, std::vector<std::optional<Drafts>>(count)};
            }
        }
        if (cycle.lookahead() == 0) return std::nullopt;
        cycle = cycle.narrower();
    }
}

}  // namespace

std::optional<Pass> next_pass(Cycle cycle, const Plan* window, std::int64_t room, const Capabilities& capabilities,
                              const std::vector<View>& views, Judge& judge) {
    if (std::any_of(views.begin(), views.end(), [](const View& view) { return !view.text.empty(); })) {
        if (std::optional<Pass> found = from_text(cycle, window, room, capabilities, views, judge)) return found;
    }
    return from_cycle(std::move(cycle), window, room, capabilities, views.size());
}

Mode make_mode(const std::string& plan, int lookahead, const std::optional<std::string>& draft) {
    if (plan == "auto" && lookahead > 0) {
        const std::string source = draft.value_or("both");
        return {"auto", std::nullopt, source == "ngram" ? 0 : lookahead, source == "lookahead" ? 0 : lookahead};
    }
    Cycle cycle = make_cycle(plan == "auto" ? "ar" : plan, lookahead);
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
