#include "tuning/tuners.h"

#include <algorithm>

namespace pass {

namespace {

// The factor from a greedy to a sampled conditional acceptance rate, where a bundle states the greedy rates alone.
constexpr double unstated = 0.6;

// Cumulative acceptance by position, as the bundle states it for this sampler; estimated where it does not.
std::vector<double> stated_acceptance(const LookaheadInfo& lookahead, Sampler sampler) {
    if (sampler == Sampler::greedy) return lookahead.acceptance_per_position;
    if (!lookahead.acceptance_per_position_sampled.empty()) return lookahead.acceptance_per_position_sampled;
    std::vector<double> shares = lookahead.acceptance_per_position;
    double left = 1.0;
    for (double& share : shares) share *= left *= unstated;
    return shares;
}

}  // namespace

Tuners::Tuners(Runner& runner) : runner_(runner) {
    const Capabilities& sizes = runner_.backend().capabilities();
    plans_[1] = timed_plans(1);
    for (int batch : sizes.batch_sizes) plans_[batch] = timed_plans(batch);
}

bool Tuners::known(Sampler sampler, int batch) const {
    const auto found = tuners_.find(sampler);
    if (found == tuners_.end()) return false;
    return batch == 1 || plans_.at(batch).empty() || found->second.by_batch().contains(batch);
}

PlanTuner* Tuners::get(Sampler sampler, int batch) {
    if (!known(sampler, batch) && !fits(batch)) return nullptr;
    auto found = tuners_.find(sampler);
    if (found == tuners_.end()) {
        const LookaheadInfo& lookahead = runner_.backend().manifest().lookahead;
        PlanTuner fresh(times(sampler, 1), static_cast<int>(lookahead.length), stated_acceptance(lookahead, sampler),
                        runner_.backend().capabilities());
        found = tuners_.emplace(sampler, std::move(fresh)).first;
    }
    PlanTuner& tuner = found->second;
    if (!known(sampler, batch)) tuner.add_batch(batch, times(sampler, batch));
    return &tuner;
}

bool Tuners::fits(int batch) const {
    int widest = 0;
    for (const std::vector<Plan>* plans : {&plans_.at(1), &plans_.at(batch)}) {
        for (const Plan& plan : *plans) widest = std::max(widest, plan.width());
    }
    return !plans_.at(1).empty() && runner_.backend().capabilities().padded_width(widest) <= runner_.slots().room();
}

PassTimes Tuners::times(Sampler sampler, int batch) {
    std::vector<Plan> plans = plans_.at(batch);
    const PassTimes* like = nullptr;
    for (const auto& [other, tuner] : tuners_) {
        if (tuner.by_batch().contains(batch)) like = &tuner.by_batch().at(batch);
    }
    if (like != nullptr) {
        int most = 0;  // drafts that a timed pass verifies
        for (const Plan& plan : plans) most = plan.groups.empty() ? std::max(most, plan.drafts) : most;
        std::erase_if(
            plans, [&](const Plan& plan) { return plan.drafts > 0 && (plan.drafts < most || !plan.groups.empty()); });
    }
    const auto time = [&](const Plan& plan) { return runner_.idle_pass({plan, batch, sampler, false}); };
    const std::vector<PassSeconds> seconds = measure(time, plans);
    TimedPasses timed;
    for (std::size_t i = 0; i < plans.size(); ++i) timed[shape_of(plans[i], batch)] = seconds[i];
    return PassTimes(timed, like);
}

std::vector<Plan> Tuners::timed_plans(int batch) const {
    std::vector<Plan> found = probe_plans(static_cast<int>(runner_.backend().manifest().lookahead.length), batch);
    const Capabilities& sizes = runner_.backend().capabilities();
    std::erase_if(found, [&](const Plan& plan) {
        return !sizes.allows({plan}) || sizes.padded_width(plan.width()) > sizes.max_capacity() / 2;
    });
    const bool one_width = std::none_of(found.begin(), found.end(),
                                        [&](const Plan& plan) { return plan.width() != found.front().width(); });
    return one_width ? std::vector<Plan>{} : found;
}

}  // namespace pass
