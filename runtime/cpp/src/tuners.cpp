#include "tuners.h"

#include <algorithm>

namespace pass {

namespace {

// What is left of each rate of acceptance when tokens are sampled, where a bundle states the greedy ones alone.
constexpr double unstated = 0.6;

// By position, as the bundle states it for this kind of decoding; derived where it does not.
std::vector<double> stated_acceptance(const LookaheadInfo& lookahead, Sampler sampler) {
    if (sampler == Sampler::greedy) return lookahead.acceptance_per_position;
    if (!lookahead.acceptance_per_position_sampled.empty()) return lookahead.acceptance_per_position_sampled;
    std::vector<double> shares = lookahead.acceptance_per_position;
    double left = 1.0;
    for (double& share : shares) share *= left *= unstated;
    return shares;
}

}  // namespace

bool Tuners::known(Sampler sampler, int batch) const {
    const auto found = tuners_.find(sampler);
    return found != tuners_.end() && (batch == 1 || found->second.times().batched.contains(batch));
}

PlanTuner& Tuners::get(Sampler sampler, int batch) {
    auto found = tuners_.find(sampler);
    if (found == tuners_.end()) {
        const LookaheadInfo& lookahead = runner_.backend().manifest().lookahead;
        PlanTuner fresh(times(sampler), static_cast<int>(lookahead.length), stated_acceptance(lookahead, sampler),
                        runner_.backend().capabilities().lookahead);
        found = tuners_.emplace(sampler, std::move(fresh)).first;
    }
    PlanTuner& tuner = found->second;
    if (!known(sampler, batch)) tuner.add_batch(batch, measured(sampler, plans(batch), batch));
    return tuner;
}

PassTimes Tuners::times(Sampler sampler) {
    const std::vector<Plan> offered = plans(1);
    const PassTimes* known = tuners_.empty() ? nullptr : &tuners_.begin()->second.times();
    const bool covered =
        known != nullptr && std::all_of(offered.begin(), offered.end(), [&](const Plan& plan) {
            return (plan.next().drafts > 0 ? known->single.lookahead : known->single.trunk).contains(plan.width());
        });
    if (!covered) return {measured(sampler, offered, 1), {}};
    std::vector<Plan> shown, drafting;
    for (const Plan& plan : offered) {
        if (!plan.is_fused()) (plan.next().drafts > 0 ? drafting : shown).push_back(plan);
    }
    if (shown.size() > 2) shown.erase(shown.begin() + 1, shown.end() - 1);
    shown.insert(shown.end(), drafting.begin(), drafting.end());
    return known->with_tail(measured(sampler, shown, 1));
}

std::vector<Plan> Tuners::plans(int batch) {
    std::vector<Plan> found = probe_plans(static_cast<int>(runner_.backend().manifest().lookahead.length), batch);
    const Capabilities& sizes = runner_.backend().capabilities();
    std::erase_if(found, [&](const Plan& plan) { return !sizes.allows({plan}) || plan.width() > runner_.room(); });
    return found;
}

Curves Tuners::measured(Sampler sampler, const std::vector<Plan>& offered, int batch) {
    return measure([&](const Plan& plan) { return runner_.idle_pass({plan, batch, sampler, false}); }, offered);
}

}  // namespace pass
