#include "decode/expected_rate.h"

#include <algorithm>
#include <numeric>

namespace pass {

namespace {

// If the next plan of the cycle can verify some n-gram drafts, a separate pass that verifies more
// of them is run only if its expected rate is at least this many times the cycle's.
constexpr double ngram_margin = 1.10;

// How many of `count` drafts are expected to be accepted, given the conditional rates.
double expected_accepted(const ConditionalAcceptance& acceptance, int count) {
    const std::vector<double> cumulative = cumulative_acceptance(acceptance.rates());
    const int end = std::min(count + 1, static_cast<int>(cumulative.size()));
    return std::accumulate(cumulative.begin() + 1, cumulative.begin() + end, 0.0);
}

}  // namespace

bool ExpectedRate::prefers_ngrams(const DraftState& state, const Plan& plan) {
    return expected_accepted(tuner_.ngram(state.match_length, state.ngram_acceptance),
                             plan.depth()) >
           expected_accepted(tuner_.lookahead_acceptance(), state.num_drafts);
}

int ExpectedRate::ngram_count(const std::vector<DraftState>& states, const Plan* cycle_plan,
                              const std::vector<Plan>& plans) {
    const auto [rate, drafts] = fastest(states, plans);
    const double cycle_rate = candidate_.rate() * static_cast<double>(states.size());
    if (cycle_plan != nullptr)
        return drafts > cycle_plan->depth() && rate >= ngram_margin * cycle_rate ? drafts : 0;
    if (rate >= switch_margin * cycle_rate) return drafts;
    // The acceptance rates drift back to the initial ones, so that n-gram drafts are tried again.
    for (const DraftState& state : states) {
        if (state.ngram.empty()) continue;
        tuner_.ngram(state.match_length, state.ngram_acceptance).forget();
        tuner_.ngram(state.match_length).forget();
    }
    return 0;
}

std::pair<double, int> ExpectedRate::fastest(const std::vector<DraftState>& states,
                                             const std::vector<Plan>& plans) {
    std::pair<double, int> result(0.0, 0);
    for (std::size_t i = 0; i < plans.size(); ++i) {
        const int drafts = static_cast<int>(i) + 1;
        double tokens = 0;
        for (const DraftState& state : states) {
            const int verified = std::min(drafts, static_cast<int>(state.ngram.size()));
            tokens += 1;  // the bonus token
            if (verified > 0)
                tokens += expected_accepted(
                    tuner_.ngram(state.match_length, state.ngram_acceptance), verified);
        }
        const double rate = tokens / tuner_.plan_seconds(plans[i], batch_);
        if (result.second == 0 || rate > result.first) result = {rate, drafts};
    }
    return result;
}

}  // namespace pass
