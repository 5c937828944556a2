#include "tuning/tuner.h"

#include <algorithm>

#include "decode/sequence.h"
#include "tuning/menu.h"

namespace pass {

namespace {

constexpr std::int64_t every = 12;  // the fewest passes between two decisions
constexpr double budget = 0.005;    // the fraction of decoding time that decisions may take
// A cycle none of whose passes is among the last idle_passes is tried for trial_passes after a decision, if it promises
// as much as the one in use; plain decoding, to which all are compared, whatever it promises.
constexpr std::int64_t idle_passes = 2000, trial_passes = 4;
constexpr double unknown = 0.1;      // acceptance rate of drafts that were never measured
constexpr double ngram_prior = 0.6;  // acceptance rate of n-gram drafts before any was verified
// The number of passes that the rates of all sequences count for in those of one. Texts differ widely in what an n-gram
// says of its next tokens: drafts that fail in one are given up after a few passes, however well they do in others.
constexpr double ngram_weight = 2.0;

std::vector<double> prior_of(const std::vector<double>& acceptance, int lookahead) {
    std::vector<double> rates;
    double before = 1.0;
    for (const double share : acceptance) {
        rates.push_back(before != 0 ? share / before : 0.0);
        before = share;
    }
    rates.resize(static_cast<std::size_t>(lookahead), unknown);
    return rates;
}

}  // namespace

PlanTuner::PlanTuner(PassTimes times, int lookahead, const std::vector<double>& acceptance,
                     std::optional<Capabilities> able)
    : by_batch_{{1, std::move(times)}},
      lookahead_(lookahead),
      able_(std::move(able)),
      drafts_(prior_of(acceptance, lookahead)),
      decided_(candidates(0, 1, {1.0}).front()) {}

void PlanTuner::observe(const Plan& plan, int batch, double seconds) {
    passes_ += 1;
    decoding_ += seconds;
    ran_[{plan.name, batch}] = passes_;
    by_batch_.at(by_batch_.contains(batch) ? batch : 1).record(shape_of(plan, batch), seconds);
}

Acceptance& PlanTuner::ngram(int matched, std::map<int, Acceptance>* own) {
    if (own != nullptr) return own->try_emplace(matched, ngram(matched).rates(), ngram_weight).first->second;
    const std::vector<double> prior(static_cast<std::size_t>(lookahead_), ngram_prior);
    return ngrams_.try_emplace(matched, prior).first->second;
}

std::vector<Candidate> PlanTuner::candidates(int lookahead, int batch, const std::vector<double>& cumulative) const {
    std::vector<Candidate> found;
    for (Cycle& cycle : menu(lookahead, able_ ? &*able_ : nullptr)) {
        if (cycle.plans.front().width() > times(1).max_rows()) continue;
        double seconds = 0;
        for (const Plan& plan : cycle.plans) seconds += plan_seconds(plan, batch);
        seconds /= static_cast<double>(cycle.plans.size());
        const double tokens = tokens_of(cycle, cumulative);
        found.push_back({std::move(cycle), tokens, seconds});
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const Candidate& a, const Candidate& b) { return a.rate() > b.rate(); });
    return found;
}

Candidate PlanTuner::mode(int lookahead, int batch, const std::vector<const Acceptance*>& acceptances) {
    const double started = now();
    const std::pair key(lookahead, batch);
    auto known = by_request_.find(key);
    if (known != by_request_.end()) decided_ = known->second.decided;
    if (known == by_request_.end() || (passes_ - decided_at_ >= every && decoding_ >= due_)) {
        known = by_request_.insert_or_assign(key, decide(lookahead, batch, acceptances)).first;
        decided_at_ = passes_;
        due_ = std::max(due_, decoding_) + (now() - started) / budget;
    }
    decided_ = known->second.decided;
    return passes_ < known->second.ends ? known->second.trial : decided_;
}

// The best candidate if it is clearly better than plain decoding and the present one, else one of those; and what is
// tried before.
PlanTuner::Decision PlanTuner::decide(int lookahead, int batch, const std::vector<const Acceptance*>& acceptances) {
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
    const std::vector<Candidate> found = candidates(lookahead, batch, cumulative);
    const auto matching = [&](const auto& test) { return std::find_if(found.begin(), found.end(), test); };
    const auto plain = matching([](const Candidate& one) { return one.cycle.lookahead() == 0; });
    auto present = matching([&](const Candidate& one) { return one.cycle == decided_.cycle; });
    if (present == found.end() || present->rate() < advantage * plain->rate()) present = plain;
    const Candidate& decided = found.front().rate() >= advantage * present->rate() ? found.front() : *present;
    auto trial = matching([&](const Candidate& one) {
        const auto ran = ran_.find({one.cycle.plans.front().name, batch});
        const bool idle = ran == ran_.end() || passes_ - ran->second >= idle_passes;
        return idle && passes_ > 0 && (one.cycle.lookahead() == 0 || one.rate() >= decided.rate());
    });
    const Candidate& tried = trial == found.end() ? decided : *trial;
    ran_[{tried.cycle.plans.front().name, batch}] = passes_;  // also if a request runs another in its place
    return {decided, tried, passes_ + trial_passes};
}

}  // namespace pass
