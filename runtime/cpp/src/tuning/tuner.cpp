#include "tuning/tuner.h"

#include <algorithm>

#include "decode/sequence.h"
#include "tuning/menu.h"

namespace pass {

namespace {

constexpr std::int64_t decision_interval_passes = 12;  // the fewest passes between two decisions
constexpr double decision_time_share = 0.005;          // the most of the decoding time for them
// After a decision, a cycle that did not run in the last idle_passes passes is tried for
// trial_passes, if it is expected to be at least as fast as the chosen cycle. Plain decoding is
// tried whatever its rate, and after plain_idle_passes, because all cycles are compared with it.
constexpr std::int64_t idle_passes = 2000, plain_idle_passes = 128, trial_passes = 4;
// A cycle with drafts is used only if its expected rate is at least this many times that of plain
// decoding: its passes take the host about 0.1 ms more, and its gain depends on the text.
constexpr double draft_margin = 1.06;
constexpr double default_acceptance = 0.1;  // of look-ahead drafts, if the bundle states none
constexpr double ngram_prior = 0.6;         // the initial acceptance of n-gram drafts
// A new sequence starts with the rates of all sequences, which weigh as much as so many passes.
// They weigh little because texts differ: n-gram drafts that fail in one text must be given up
// after a few passes, however well they do in others.
constexpr double ngram_prior_passes = 2.0;

// [L] conditional rates from cumulative `acceptance`; default_acceptance beyond its end.
std::vector<double> conditional_rates(const std::vector<double>& acceptance, int lookahead) {
    std::vector<double> rates;
    double before = 1.0;
    for (const double share : acceptance) {
        rates.push_back(before != 0 ? share / before : 0.0);
        before = share;
    }
    rates.resize(static_cast<std::size_t>(lookahead), default_acceptance);
    return rates;
}

// The acceptance of sampled drafts relative to greedy ones, if a bundle states only the latter.
constexpr double sampled_acceptance_ratio = 0.6;

// The cumulative acceptance that the bundle states for `sampler`; estimated from that of greedy
// decoding if it states none.
std::vector<double> stated_acceptance(const LookaheadInfo& lookahead, Sampler sampler) {
    if (sampler == Sampler::greedy) return lookahead.acceptance_per_position;
    if (!lookahead.acceptance_per_position_sampled.empty())
        return lookahead.acceptance_per_position_sampled;
    std::vector<double> shares = lookahead.acceptance_per_position;
    double ratio = 1.0;
    for (double& share : shares) share *= ratio *= sampled_acceptance_ratio;
    return shares;
}

}  // namespace

Tuner::Tuner(PassTimes times, int lookahead, const std::vector<double>& acceptance,
             std::optional<Capabilities> capabilities)
    : by_batch_{{1, std::move(times)}},
      lookahead_(lookahead),
      capabilities_(std::move(capabilities)),
      lookahead_acceptance_(conditional_rates(acceptance, lookahead)),
      decided_(candidates(0, 1, {1.0}).front()) {}  // plain decoding

void Tuner::observe(const Plan& plan, int batch, double seconds) {
    passes_ += 1;
    pass_seconds_ += seconds;
    last_ran_[{plan.name, batch}] = passes_;
    by_batch_.at(by_batch_.contains(batch) ? batch : 1).record(shape_of(plan, batch), seconds);
}

ConditionalAcceptance& Tuner::ngram(int match_length, std::map<int, ConditionalAcceptance>* own) {
    if (own != nullptr)
        return own->try_emplace(match_length, ngram(match_length).rates(), ngram_prior_passes)
            .first->second;
    const std::vector<double> prior(static_cast<std::size_t>(lookahead_), ngram_prior);
    return ngrams_.try_emplace(match_length, prior).first->second;
}

std::vector<Candidate> Tuner::candidates(int lookahead, int batch,
                                         const std::vector<double>& cumulative) const {
    std::vector<Candidate> result;
    auto cached = menus_.find(lookahead);
    if (cached == menus_.end())
        cached =
            menus_.emplace(lookahead, menu(lookahead, capabilities_ ? &*capabilities_ : nullptr))
                .first;
    for (const Cycle& cycle : cached->second) {
        if (cycle.plans.front().width() > times(1).max_rows()) continue;
        double seconds = 0;
        for (const Plan& plan : cycle.plans) seconds += plan_seconds(plan, batch);
        seconds /= static_cast<double>(cycle.plans.size());
        result.push_back({cycle, expected_tokens(cycle, cumulative), seconds});
    }
    std::stable_sort(result.begin(), result.end(),
                     [](const Candidate& a, const Candidate& b) { return a.rate() > b.rate(); });
    return result;
}

Candidate Tuner::next_candidate(int lookahead, int batch,
                                const std::vector<const ConditionalAcceptance*>& acceptances) {
    const double started = now();
    const std::pair key(lookahead, batch);
    auto entry = decisions_.find(key);
    if (entry != decisions_.end()) decided_ = entry->second.decided;  // `decide` compares with it
    if (entry == decisions_.end() ||
        (passes_ - decided_at_ >= decision_interval_passes && pass_seconds_ >= due_seconds_)) {
        entry = decisions_.insert_or_assign(key, decide(lookahead, batch, acceptances)).first;
        decided_at_ = passes_;
        due_seconds_ =
            std::max(due_seconds_, pass_seconds_) + (now() - started) / decision_time_share;
    }
    decided_ = entry->second.decided;
    return passes_ < entry->second.trial_end ? entry->second.trial : decided_;
}

// Decide for the fastest candidate if it is switch_margin times as fast as the last decided one,
// else for that one; for plain decoding if this is not draft_margin times as fast.
Tuner::Decision Tuner::decide(int lookahead, int batch,
                              const std::vector<const ConditionalAcceptance*>& acceptances) {
    std::vector<double> cumulative = cumulative_acceptance(lookahead_acceptance_.rates());
    if (!acceptances.empty()) std::fill(cumulative.begin(), cumulative.end(), 0.0);
    for (const ConditionalAcceptance* acceptance : acceptances) {  // `cumulative` is their mean
        const std::vector<double> own = cumulative_acceptance(acceptance->rates());
        for (std::size_t i = 0; i < cumulative.size(); ++i)
            cumulative[i] += own[i] / static_cast<double>(acceptances.size());
    }
    const std::vector<Candidate> ranked = candidates(lookahead, batch, cumulative);
    const auto matching = [&](const auto& test) {
        return std::find_if(ranked.begin(), ranked.end(), test);
    };
    const auto plain = matching([](const Candidate& each) { return each.cycle.depth() == 0; });
    auto present = matching([&](const Candidate& each) { return each.cycle == decided_.cycle; });
    if (present == ranked.end()) present = plain;
    if (ranked.front().rate() >= switch_margin * present->rate()) present = ranked.begin();
    const Candidate& decided = present->rate() < draft_margin * plain->rate() ? *plain : *present;
    const auto trial = matching([&](const Candidate& each) {
        const auto ran = last_ran_.find({each.cycle.plans.front().name, batch});
        const bool is_plain = each.cycle.depth() == 0;
        const bool idle = ran == last_ran_.end() ||
                          passes_ - ran->second >= (is_plain ? plain_idle_passes : idle_passes);
        return idle && passes_ > 0 && (is_plain || each.rate() >= decided.rate());
    });
    const Candidate& tried = trial == ranked.end() ? decided : *trial;
    // The trial counts as run, even if a pass runs the plan that a request names instead.
    last_ran_[{tried.cycle.plans.front().name, batch}] = passes_;
    return {decided, tried, passes_ + trial_passes};
}

Tuners::Tuners(Runner& runner) : runner_(runner) {
    plans_[1] = timed_plans(1);
    for (int batch : runner_.backend().capabilities().batch_sizes)
        plans_[batch] = timed_plans(batch);
}

bool Tuners::is_timed(Sampler sampler, int batch) const {
    const auto tuner = tuners_.find(sampler);
    if (tuner == tuners_.end()) return false;
    return batch == 1 || plans_.at(batch).empty() || tuner->second.by_batch().contains(batch);
}

Tuner* Tuners::get(Sampler sampler, int batch) {
    if (!is_timed(sampler, batch) && !fits(batch)) return nullptr;
    auto entry = tuners_.find(sampler);
    if (entry == tuners_.end()) {
        const LookaheadInfo& lookahead = runner_.backend().manifest().lookahead;
        Tuner made(times(sampler, 1), static_cast<int>(lookahead.length),
                   stated_acceptance(lookahead, sampler), runner_.backend().capabilities());
        entry = tuners_.emplace(sampler, std::move(made)).first;
    }
    Tuner& tuner = entry->second;
    if (!is_timed(sampler, batch)) tuner.add_batch(batch, times(sampler, batch));
    return &tuner;
}

bool Tuners::fits(int batch) const {
    int widest = 0;
    for (const std::vector<Plan>* plans : {&plans_.at(1), &plans_.at(batch)}) {
        for (const Plan& plan : *plans) widest = std::max(widest, plan.width());
    }
    return !plans_.at(1).empty() &&
           runner_.backend().capabilities().padded_width(widest) <= runner_.slots().room();
}

PassTimes Tuners::times(Sampler sampler, int batch) {
    std::vector<Plan> plans = plans_.at(batch);
    const PassTimes* other_sampler = nullptr;
    for (const auto& [other, tuner] : tuners_) {
        if (tuner.by_batch().contains(batch)) other_sampler = &tuner.by_batch().at(batch);
    }
    if (other_sampler != nullptr) {
        int max_drafts = 0;  // of the plans that only verify
        for (const Plan& plan : plans)
            max_drafts = plan.groups.empty() ? std::max(max_drafts, plan.drafts) : max_drafts;
        // Tails differ by sampled rows and drafts: plain decoding, the widest plan that only
        // verifies, and the plans that only draft show both.
        std::erase_if(plans, [&](const Plan& plan) {
            return plan.drafts > 0 && (plan.drafts < max_drafts || !plan.groups.empty());
        });
    }
    const auto time = [&](const Plan& plan) {
        return runner_.time_masked_pass({plan, batch, sampler, false});
    };
    const std::vector<PassSeconds> seconds = measure(time, plans);
    TimedPasses timed;
    for (std::size_t i = 0; i < plans.size(); ++i) timed[shape_of(plans[i], batch)] = seconds[i];
    return PassTimes(timed, other_sampler);
}

std::vector<Plan> Tuners::timed_plans(int batch) const {
    std::vector<Plan> result =
        probe_plans(static_cast<int>(runner_.backend().manifest().lookahead.length), batch);
    const Capabilities& capabilities = runner_.backend().capabilities();
    std::erase_if(result, [&](const Plan& plan) {
        return !capabilities.allows({plan}) ||
               capabilities.padded_width(plan.width()) > capabilities.max_capacity() / 2;
    });
    const bool one_width = std::none_of(result.begin(), result.end(), [&](const Plan& plan) {
        return plan.width() != result.front().width();
    });
    return one_width ? std::vector<Plan>{} : result;
}

}  // namespace pass
