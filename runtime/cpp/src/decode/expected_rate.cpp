#include "decode/expected_rate.h"

#include <algorithm>
#include <numeric>

namespace pass {

namespace {

// If the next plan of the cycle can verify some n-gram drafts, a separate pass that verifies more
// of them is run only if its expected rate is at least this many times the cycle's.
constexpr double ngram_margin = 1.10;

// The sum of the entries `from` to `to` - 1, as far as there are any.
double sum(const std::vector<double>& cumulative, int from, int to) {
    const int end = std::min(to, static_cast<int>(cumulative.size()));
    return from >= end ? 0.0
                       : std::accumulate(cumulative.begin() + from, cumulative.begin() + end, 0.0);
}

}  // namespace

bool ExpectedRate::prefers_ngrams(const DraftState& state, const Plan& plan) {
    const double ngram_tokens =
        sum(cumulative_acceptance(tuner_.ngram(state.match_length, state.ngram_acceptance).rates()),
            1, plan.depth() + 1);
    return ngram_tokens > sum(cumulative_acceptance(tuner_.lookahead_acceptance().rates()), 1,
                              state.num_drafts + 1);
}

int ExpectedRate::ngram_count(const std::vector<DraftState>& states, const Plan* cycle_plan,
                              const std::vector<Plan>& plans) {
    const auto [rate, drafts] = best(states, plans);
    const double expected = candidate_.rate() * static_cast<double>(states.size());
    if (cycle_plan != nullptr)
        return drafts > cycle_plan->depth() && rate >= ngram_margin * expected ? drafts : 0;
    if (rate >= switch_margin * expected) return drafts;
    // The rates drift back to the initial ones, so that n-gram drafts are tried again.
    for (const DraftState& state : states) {
        if (state.ngram.empty()) continue;
        tuner_.ngram(state.match_length, state.ngram_acceptance).forget();
        tuner_.ngram(state.match_length).forget();
    }
    return 0;
}

std::pair<double, int> ExpectedRate::best(const std::vector<DraftState>& states,
                                          const std::vector<Plan>& plans) {
    std::pair<double, int> result(0.0, 0);
    for (std::size_t i = 0; i < plans.size(); ++i) {
        const int drafts = static_cast<int>(i) + 1;
        double tokens = 0;
        for (const DraftState& state : states) {
            const int length = std::min(drafts, static_cast<int>(state.ngram.size()));
            if (length == 0) {
                tokens += 1;
            } else {
                const std::vector<double> rates =
                    tuner_.ngram(state.match_length, state.ngram_acceptance).rates();
                tokens += sum(cumulative_acceptance(rates), 0, length + 1);
            }
        }
        const double rate = tokens / tuner_.plan_seconds(plans[i], batch_);
        if (result.second == 0 || rate > result.first) result = {rate, drafts};
    }
    return result;
}

}  // namespace pass
