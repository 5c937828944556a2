#include "tuning/tuner.h"

#include <algorithm>
#include <iterator>
#include <numeric>

#include "bundle/tree.h"
#include "decode/sequence.h"
#include "tuning/group_sizes.h"
#include "tuning/tree_groups.h"

namespace pass {

namespace {

constexpr std::int64_t every = 12;   // the fewest passes between two decisions
constexpr double budget = 0.005;     // the fraction of decoding time that decisions may take
constexpr double advantage = 1.03;   // how much faster another plan must promise to be
constexpr double clearly = 1.10;     // the same of n-gram drafts, where a pass verifies some of them anyway
constexpr double unknown = 0.1;      // acceptance rate of drafts that were never measured
constexpr double ngram_prior = 0.6;  // acceptance rate of n-gram drafts before any was verified
// The number of passes that the rates of all sequences count for in those of one. Texts differ widely in what an n-gram
// says of its next tokens: drafts that fail in one are given up after a few passes, however well they do in others.
constexpr double ngram_weight = 2.0;

std::vector<double> prior_of(std::vector<double> acceptance, int lookahead) {
    acceptance.insert(acceptance.begin(), 1.0);
    std::vector<double> rates = conditional_acceptance(acceptance);
    rates.resize(static_cast<std::size_t>(lookahead), unknown);
    return rates;
}

double sum(const std::vector<double>& cumulative, int from, int to) {
    const int end = std::min(to, static_cast<int>(cumulative.size()));
    return from >= end ? 0.0 : std::accumulate(cumulative.begin() + from, cumulative.begin() + end, 0.0);
}

}  // namespace

PlanTuner::PlanTuner(PassTimes times, int lookahead, const std::vector<double>& acceptance, std::optional<int> exactly,
                     std::vector<int> trees)
    : by_batch_{{1, std::move(times)}},
      lookahead_(lookahead),
      exactly_(exactly),
      trees_(std::move(trees)),
      drafts_(prior_of(acceptance, lookahead)),
      decided_(candidate(make_cycle("ar", 0), 1.0, 1)) {}

void PlanTuner::observe(const Plan& plan, int batch, double seconds) {
    passes_ += 1;
    decoding_ += seconds;
    by_batch_.at(by_batch_.contains(batch) ? batch : 1).record(shape_of(plan, batch), seconds);
}

Acceptance& PlanTuner::ngram(int matched, std::map<int, Acceptance>* own) {
    if (own != nullptr) return own->try_emplace(matched, ngram(matched).rates(), ngram_weight).first->second;
    const std::vector<double> prior(static_cast<std::size_t>(lookahead_), ngram_prior);
    return ngrams_.try_emplace(matched, prior).first->second;
}

Candidate PlanTuner::candidate(Cycle cycle, double tokens, int batch) const {
    std::vector<PassShape> shapes;
    double seconds = 0;
    for (const Plan& plan : cycle.plans) {
        shapes.push_back(shape_of(plan, batch));
        seconds += times(batch).seconds(shapes.back());
    }
    const double doubt = cycle.lookahead() > 0 ? times(batch).doubt(shapes, shape_of(ar_plan(), batch)) : 0.0;
    return {std::move(cycle), tokens, seconds / static_cast<double>(shapes.size()), doubt};
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
    const auto cost = [&](int width, int drafts) {
        return times(batch).seconds({batch * width, batch * (drafts + 1), batch * drafts});
    };
    if (const std::optional<GroupChoice> shape = best_shape(cumulative, cost, times(1).max_rows(), shapes)) {
        found.push_back(candidate(fused_cycle(shape->groups), shape->tokens, batch));
    }
    TreeChoices trees{trees_, lookahead, exactly_.has_value()};
    std::erase_if(trees.sizes, [&](int size) { return tree_depth(size) > lookahead; });
    if (const std::optional<GroupChoice> tree =
            best_tree(trees, conditional_acceptance(cumulative), cost, times(1).max_rows())) {
        found.push_back(candidate(tree_cycle(tree->groups, lookahead), tree->tokens, batch));
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
    if (known == by_request_.end() || (passes_ >= every && decoding_ >= due_)) {
        by_request_[request] = decide(lookahead, batch, acceptances);
        passes_ = 0;
        due_ = std::max(due_, decoding_) + (now() - started) / budget;
    }
    return decided_;
}

// The best candidate where it is clearly better than plain decoding and the present one, else one of those.
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
    const auto matching = [&](const auto& test) { return std::find_if(found.begin(), found.end(), test); };
    const auto plain = matching([](const Candidate& one) { return one.cycle.lookahead() == 0; });
    // The sizes of the present plan may be others by now.
    const auto kind = [](const Cycle& cycle) {
        return std::tuple(cycle.plans.size(), cycle.plans.front().is_fused(), cycle.is_tree());
    };
    auto present = matching([&](const Candidate& one) { return kind(one.cycle) == kind(decided_.cycle); });
    if (present == found.end() || present->rate() < advantage * plain->rate()) present = plain;
    const auto best = std::max_element(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
        return a.sure_rate() < b.sure_rate();
    });
    decided_ = best->sure_rate() >= advantage * present->sure_rate() ? *best : *present;
    return decided_;
}

bool ExpectedRate::prefers(const DraftState& state, const Plan& plan) {
    const double text =
        sum(cumulative_acceptance(tuner_.ngram(state.matched, state.ngrams).rates()), 1, plan.depth() + 1);
    return text > sum(cumulative_acceptance(tuner_.drafts().rates()), 1, state.left + 1);
}

int ExpectedRate::count(const std::vector<DraftState>& states, const Plan* window, const std::vector<Plan>& plans) {
    const auto [rate, drafts] = best(states, plans);
    const double decided = decided_.rate() * static_cast<double>(states.size());
    if (window != nullptr) return drafts > window->depth() && rate >= clearly * decided ? drafts : 0;
    if (rate >= advantage * decided) return drafts;
    for (const DraftState& state : states) {
        if (state.ngram.empty()) continue;
        tuner_.ngram(state.matched, state.ngrams).forget();
        tuner_.ngram(state.matched).forget();
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
            if (length == 0) {
                tokens += 1;
            } else {
                const std::vector<double> rates = tuner_.ngram(state.matched, state.ngrams).rates();
                tokens += sum(cumulative_acceptance(rates), 0, length + 1);
            }
        }
        const double rate = tokens / tuner_.plan_seconds(plans[i], batch_);
        if (found.second == 0 || rate > found.first) found = {rate, drafts};
    }
    return found;
}

}  // namespace pass
