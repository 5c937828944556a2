// --plan auto: chooses the plan with the most expected tokens per second, from the times of passes and the acceptance.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "decode/draft_policy.h"
#include "tuning/acceptance.h"
#include "tuning/pass_times.h"

namespace pass {

// A cycle of plans, with the expected tokens and seconds of a pass for each sequence of a batch.
struct Candidate {
    Cycle cycle;
    double tokens = 0;
    double seconds = 0;
    double doubt = 0;  // by what share its passes may take longer than expected, compared with plain ones

    double rate() const { return tokens / seconds; }
    // The rate if passes take as much longer as they may.
    double sure_rate() const { return rate() / (1 + doubt); }
};

// Pass times and acceptance rates for one kind of sampling in a session; all requests share them.
class PlanTuner {
   public:
    // acceptance: cumulative, by position, as the bundle states it; empty where it does not.
    // exactly: the only look-ahead that the engines have plans for (see `Capabilities::lookahead`).
    // trees: the sizes of the trees of drafts that there are.
    PlanTuner(PassTimes times, int lookahead, const std::vector<double>& acceptance, std::optional<int> exactly = {},
              std::vector<int> trees = {});

    // The times of passes by batch size. One that was not timed counts as one window with as many rows.
    const std::map<int, PassTimes>& by_batch() const { return by_batch_; }
    void add_batch(int batch, PassTimes times) { by_batch_.emplace(batch, std::move(times)); }
    const PassTimes& times(int batch) const { return by_batch_.at(by_batch_.contains(batch) ? batch : 1); }
    double plan_seconds(const Plan& plan, int batch = 1) const { return times(batch).seconds(shape_of(plan, batch)); }
    // Record that a pass of `plan` took `seconds`.
    void observe(const Plan& plan, int batch, double seconds);

    Acceptance& drafts() { return drafts_; }
    // The acceptance of n-gram drafts that follow a match of `matched` tokens: that of a sequence, among its `own`, or
    // that of all sequences.
    Acceptance& ngram(int matched, std::map<int, Acceptance>* own = nullptr);
    // The acceptance rates that a new sequence starts with: those of all sequences.
    Acceptance new_acceptance() const { return Acceptance(drafts_.rates()); }

    // The cycle for the next pass. It is decided at the first request with these arguments and again from time to time,
    // so seldom that deciding takes at most a hundredth of the time of passes.
    Candidate mode(int lookahead, int batch, const std::vector<const Acceptance*>& acceptances);
    // `ar`, the best two-pass and fused cycles and the best tree, at most `lookahead` drafts deep; the fastest first.
    std::vector<Candidate> candidates(int lookahead, int batch, std::vector<double> cumulative) const;

   private:
    Candidate candidate(Cycle cycle, double tokens, int batch) const;
    Candidate decide(int lookahead, int batch, const std::vector<const Acceptance*>& acceptances);

    std::map<int, PassTimes> by_batch_;
    int lookahead_;
    std::optional<int> exactly_;
    std::vector<int> trees_;
    Acceptance drafts_;
    std::map<int, Acceptance> ngrams_;
    Candidate decided_;
    std::map<std::pair<int, int>, Candidate> by_request_;  // by look-ahead and batch
    std::int64_t passes_ = 0;                              // since the last decision
    double decoding_ = 0, due_ = 0;                        // seconds of passes, and those before the next decision
};

// Verifies n-gram drafts where they promise more tokens per second than the cycle `decided` does without them.
class ExpectedRate : public DraftPolicy {
   public:
    ExpectedRate(PlanTuner& tuner, const Candidate& decided, int batch)
        : tuner_(tuner), decided_(decided), batch_(batch) {}
    bool prefers(const DraftState& state, const Plan& plan) override;
    int count(const std::vector<DraftState>& states, const Plan* window, const std::vector<Plan>& plans) override;

   private:
    // The highest expected tokens per second of `plans`, which verify 1, 2, ... n-gram drafts, and the drafts of that
    // plan.
    std::pair<double, int> best(const std::vector<DraftState>& states, const std::vector<Plan>& plans);

    PlanTuner& tuner_;
    const Candidate& decided_;
    int batch_;
};

}  // namespace pass
