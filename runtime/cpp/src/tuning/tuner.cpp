#include "tuning/tuner.h"

#include <algorithm>
#include <iterator>
#include <numeric>

#include "decode/sequence.h"
#include "tuning/group_sizes.h"

namespace pass {

namespace {

constexpr std::int64_t every = 12;   // the fewest passes between two decisions
constexpr double budget = 0.01;      // the fraction of decoding time that decisions may take
constexpr double advantage = 1.10;   // how much faster another plan must promise to be
constexpr double keep = 1.03;        // how much faster than plain decoding a plan must be to be kept
constexpr double unknown = 0.1;      // acceptance rate of drafts that were never measured
constexpr double ngram_prior = 0.6;  // acceptance rate of n-gram drafts before any was verified

std::vector<double> prior_of(const std::vector<double>& acceptance, int lookahead) {
    std::vector<double> rates;
    double before = 1.0;
    for (double after : acceptance) {
        rates.push_back(before != 0 ? after / before : 0.0);
        before = after;
    }
    rates.resize(static_cast<std::size_t>(lookahead), unknown);
    return rates;
}

double sum(const std::vector<double>& cumulative, int from, int to) {
    const int end = std::min(to, static_cast<int>(cumulative.size()));
    return from >= end ? 0.0 : std::accumulate(cumulative.begin() + from, cumulative.begin() + end, 0.0);
}

}  // namespace

PlanTuner::PlanTuner(PassTimes times, int lookahead, const std::vector<double>& acceptance, std::optional<int> exactly)
    : times_(std::move(times)), lookahead_(lookahead), exactly_(exactly), drafts_(prior_of(acceptance, lookahead)) {
    decided_ = {make_cycle("ar", 0), 1.0, times_.seconds(1, 1, 0)};
}

double PlanTuner::seconds(int width, int targets, int drafts, int batch) const {
    return slower_at(batch * width) * times_.seconds(width, targets, drafts, batch);
}

double PlanTuner::plan_seconds(const Plan& plan, int batch) const {
    return seconds(plan.width(), plan.drafts + 1, plan.next().drafts, batch);
}

double PlanTuner::slower_at(int rows) const {
    if (slower_.empty()) return 1.0;
    // Constant beyond the outermost points, where `between` would extrapolate.
    return between(slower_, std::clamp(rows, slower_.begin()->first, slower_.rbegin()->first));
}

void PlanTuner::observe(const Plan& plan, int batch, double seconds) {
    passes_ += 1;
    debt_ -= budget * seconds;
    const double ratio = seconds / times_.plan_seconds(plan, batch);
    const int rows = batch * plan.width();
    slower_.try_emplace(rows, slower_at(rows));
    for (auto& [width, slower] : slower_) {
        const double share = width == rows ? 1.0 / 8 : 1.0 / 64;
        slower +=
            (std::min(ratio, 1.5 * slower) - slower) * share;  // an outlier, such as a pause of the process, is limited
    }
}

Acceptance& PlanTuner::ngram(int matched) {
    const std::vector<double> prior(static_cast<std::size_t>(lookahead_), ngram_prior);
    return ngrams_.try_emplace(matched, prior).first->second;
}

Candidate PlanTuner::candidate(Cycle cycle, double tokens, int batch) const {
    double seconds = 0;
    for (const Plan& plan : cycle.plans) seconds += plan_seconds(plan, batch);
    const auto passes = static_cast<double>(cycle.plans.size());
    return {std::move(cycle), tokens, seconds / passes};
}

std::vector<Candidate> PlanTuner::candidates(int lookahead, int batch, std::vector<double> cumulative) const {
    cumulative.resize(std::min(cumulative.size(), static_cast<std::size_t>(lookahead) + 1));
    std::vector<Candidate> found{candidate(make_cycle("ar", 0), 1.0, batch)};
    std::optional<Candidate> two_pass;
    for (int length = 1; length <= lookahead; ++length) {
        if (length != exactly_.value_or(length)) continue;
        Candidate one = candidate(make_cycle("two-pass", length), two_pass_tokens(length, cumulative), batch);
        if (!two_pass || one.rate() > two_pass->rate()) two_pass = std::move(one);
    }
    if (two_pass) found.push_back(std::move(*two_pass));
    const auto shapes = [&](int drafts) -> std::vector<std::vector<int>> {
        if (!exactly_) return group_shapes(drafts);
        if (drafts != *exactly_) return {};
        return {full_shape(drafts)};
    };
    const auto cost = [&](int width, int drafts) { return seconds(width, drafts + 1, drafts, batch); };
    if (const std::optional<GroupChoice> shape = best_shape(cumulative, cost, times_.max_width(), shapes)) {
        found.push_back({fused_cycle(shape->groups), shape->tokens, shape->seconds});
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const Candidate& a, const Candidate& b) { return a.rate() > b.rate(); });
    return found;
}

Candidate PlanTuner::mode(int lookahead, int batch, const std::vector<const Acceptance*>& acceptances) {
    const double started = now();
    const std::pair request(lookahead, batch);
    const auto known = by_request_.find(request);
    if (known != by_request_.end()) decided_ = known->second;
    if (known == by_request_.end() || (passes_ >= every && debt_ <= 0)) {
        by_request_[request] = decide(lookahead, batch, acceptances);
        passes_ = 0;
        debt_ = std::max(debt_, 0.0) + now() - started;
    }
    return decided_;
}

// Keep the present cycle unless another one is clearly faster; plain decoding where none is clearly faster than that.
Candidate PlanTuner::decide(int lookahead, int batch, const std::vector<const Acceptance*>& acceptances) {
    std::vector<double> cumulative = cumulative_acceptance(drafts_.rates());
    if (!acceptances.empty()) {  // the mean over the sequences of the batch
        std::fill(cumulative.begin(), cumulative.end(), 0.0);
        for (const Acceptance* one : acceptances) {
            const std::vector<double> its = cumulative_acceptance(one->rates());
            for (std::size_t i = 0; i < cumulative.size(); ++i) {
                cumulative[i] += its[i] / static_cast<double>(acceptances.size());
            }
        }
    }
    const std::vector<Candidate> found = candidates(lookahead, batch, std::move(cumulative));
    const Candidate& best = found.front();
    const auto matching = [&](const auto& test) { return std::find_if(found.begin(), found.end(), test); };
    const Candidate& plain = *matching([](const Candidate& one) { return one.cycle.lookahead() == 0; });
    auto present = matching([&](const Candidate& one) { return one.cycle == decided_.cycle; });
    if (present == found.end()) {  // the present one has another shape, or the look-ahead of another request
        const bool fused = decided_.cycle.plans.front().is_fused();
        present = matching([&](const Candidate& one) { return one.cycle.plans.front().is_fused() == fused; });
        if (present == found.end()) present = found.begin();
    }
    if (&*present == &plain || present->rate() < keep * plain.rate()) {
        decided_ = best.rate() >= advantage * plain.rate() ? best : plain;
    } else {
        decided_ = best.rate() >= advantage * present->rate() ? best : *present;
    }
    return decided_;
}

bool ExpectedRate::prefers(const DraftState& state, const Plan& plan) {
    const double text = sum(cumulative_acceptance(tuner_.ngram(state.matched).rates()), 1, plan.drafts + 1);
    return text > sum(cumulative_acceptance(tuner_.drafts().rates()), 1, state.left + 1);
}

int ExpectedRate::count(const std::vector<DraftState>& states, const Plan* window, const std::vector<Plan>& plans) {
    const auto [rate, drafts] = best(states, plans);
    const double decided = decided_.rate() * static_cast<double>(states.size());
    if (window != nullptr) return drafts > window->drafts && rate >= advantage * decided ? drafts : 0;
    if (rate >= keep * decided) return drafts;
    for (const DraftState& state : states) {
        if (!state.ngram.empty()) tuner_.ngram(state.matched).forget();
    }
    return 0;
}

std::pair<double, int> ExpectedRate::best(const std::vector<DraftState>& states, const std::vector<Plan>& plans) {
    std::pair<double, int> found(0.0, 0);
    for (std::size_t i = 0; i < plans.size(); ++i) {
        const int drafts = static_cast<int>(i) + 1;
        double tokens = 0;
        for (const DraftState& state : states) {
            const int length = std::min(drafts, static_cast<int>(state.ngram.size()));
            tokens +=
                length == 0 ? 1.0 : sum(cumulative_acceptance(tuner_.ngram(state.matched).rates()), 0, length + 1);
        }
        const double rate = tokens / tuner_.plan_seconds(plans[i], batch_);
        if (found.second == 0 || rate > found.first) found = {rate, drafts};
    }
    return found;
}

}  // namespace pass
