// --plan auto: the plan with the most expected tokens per second, from measured passes and observed acceptance.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "acceptance.h"
#include "draft_policy.h"
#include "pass_times.h"

namespace pass {

// A mode with what it is expected to do for each sequence of a batch.
struct Candidate {
    Cycle cycle;
    double tokens = 0;
    double seconds = 0;

    double rate() const { return tokens / seconds; }
};

// What one session knows: pass times, and how well drafts do. Requests share it.
class PlanTuner {
   public:
    // acceptance: by position, for the kind of decoding at hand; empty where it is not known.
    // exactly: the only look-ahead that there are plans for, with full groups (see `Capabilities::lookahead`).
    PlanTuner(PassTimes times, int lookahead, const std::vector<double>& acceptance, std::optional<int> exactly = {});

    const PassTimes& times() const { return times_; }
    // Passes over `batch` slots, in the trunk.
    void add_batch(int batch, Curves times) { times_.batched[batch] = std::move(times); }
    // Of one pass: as measured, and corrected by the passes since.
    double seconds(int width, int targets, int drafts, int batch = 1) const;
    double plan_seconds(const Plan& plan, int batch = 1) const;
    // A pass over `plan` took so long.
    void observe(const Plan& plan, int batch, double seconds);

    Acceptance& drafts() { return drafts_; }
    // The acceptance of text drafts behind a match of `matched` tokens.
    Acceptance& text(int matched);
    // Of one sequence: what is known of all of them, to begin with.
    Acceptance new_acceptance() const { return Acceptance(drafts_.rates()); }

    // The mode for the next pass: decided anew from time to time, and where nobody has asked for this before.
    // Decisions take at most a hundredth of the time that passes take.
    Candidate mode(int lookahead, int batch, const std::vector<const Acceptance*>& acceptances);
    // The best of each mode with at most `lookahead` drafts, `ar` included; best first.
    std::vector<Candidate> candidates(int lookahead, int batch, std::vector<double> chain) const;

   private:
    Candidate candidate(Cycle cycle, double tokens, int batch) const;
    Candidate decide(int lookahead, int batch, const std::vector<const Acceptance*>& acceptances);
    double slower_at(int rows) const;

    PassTimes times_;
    int lookahead_;
    std::optional<int> exactly_;
    Acceptance drafts_;
    std::map<int, Acceptance> texts_;
    Candidate decided_;
    Points slower_;  // by rows of a pass, of all slots: how much longer passes take than measured, a running average
    std::map<std::pair<int, int>, Candidate> by_request_;  // by look-ahead and batch
    std::int64_t passes_ = 0;
    double debt_ = 0.0;
};

// Text drafts are tried where they promise more tokens per second than `decided` does without them.
class Expected : public Judge {
   public:
    Expected(PlanTuner& tuner, const Candidate& decided, int batch) : tuner_(tuner), decided_(decided), batch_(batch) {}
    bool prefers(const View& view, const Plan& plan) override;
    int count(const std::vector<View>& views, const Plan* window, const std::vector<Plan>& plans) override;

   private:
    // The most tokens per second that one of `plans`, of 1, 2, ... text drafts, promises, and how many it has.
    std::pair<double, int> best(const std::vector<View>& views, const std::vector<Plan>& plans);

    PlanTuner& tuner_;
    const Candidate& decided_;
    int batch_;
};

}  // namespace pass
