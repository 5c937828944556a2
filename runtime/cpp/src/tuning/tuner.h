// --plan auto: chooses the plan with the most expected tokens per second, from the times of passes and the acceptance.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "backends/capabilities.h"
#include "decode/runner.h"
#include "tuning/estimates.h"

namespace pass {

// Switch plans only if the expected rate is at least this many times the current plan's.
inline constexpr double switch_margin = 1.03;

// A cycle of plans, with the expected tokens and seconds of a pass for each sequence of a batch.
struct Candidate {
    Cycle cycle;
    double tokens = 0;
    double seconds = 0;

    double rate() const { return tokens / seconds; }
};

// Pass times and acceptance rates for one kind of sampling in a session; all requests share them.
class PlanTuner {
   public:
    // acceptance: cumulative, by position, as the bundle states it; empty if it does not. able: as for `menu`.
    PlanTuner(PassTimes times, int lookahead, const std::vector<double>& acceptance,
              std::optional<Capabilities> able = {});

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
    // so seldom that deciding takes at most a two-hundredth of the time of passes.
    Candidate mode(int lookahead, int batch, const std::vector<const Acceptance*>& acceptances);
    // The menu, with drafts at most `lookahead` deep and windows not wider than those that were timed; best first.
    std::vector<Candidate> candidates(int lookahead, int batch, const std::vector<double>& cumulative) const;

   private:
    struct Decision {
        Candidate decided, trial;  // the trial comes first,
        std::int64_t ends = 0;     // until there were so many passes in all
    };
    Decision decide(int lookahead, int batch, const std::vector<const Acceptance*>& acceptances);

    std::map<int, PassTimes> by_batch_;
    int lookahead_;
    std::optional<Capabilities> able_;
    mutable std::map<int, std::vector<Cycle>> menus_;  // by look-ahead
    Acceptance drafts_;
    std::map<int, Acceptance> ngrams_;
    Candidate decided_;
    std::map<std::pair<int, int>, Decision> by_request_;       // by look-ahead and batch
    std::map<std::pair<std::string, int>, std::int64_t> ran_;  // by plan and batch: the number of its last pass
    std::int64_t passes_ = 0, decided_at_ = 0;                 // in all; when it decided last
    double decoding_ = 0, due_ = 0;                            // seconds of passes, and those before the next decision
};

// The first request with plan `auto` times passes of all widths. The first one of another sampler times only the
// passes that show how its tail differs. The first batch of a new size is timed,
// too.
//
// Which passes are timed depends on the bundle, the engine and the KV capacity alone. While the sequences of the moment
// leave too little room for those passes, nothing is timed.
class Tuners {
   public:
    explicit Tuners(Runner& runner);

    // Whether `get` would have nothing to time.
    bool known(Sampler sampler, int batch) const;

    // The tuner for `sampler`, with the times of passes over `batch` slots; times them first if need be. Null while
    // there is no room for the timed windows after the sequences in the KV cache; always, if the capacity is too
    // small.
    PlanTuner* get(Sampler sampler, int batch);

   private:
    // Whether the KV cache has room now for the passes that are timed with one slot and with `batch` slots.
    bool fits(int batch) const;
    // The times of passes over `batch` slots. If those for another sampler are known, few passes are timed.
    PassTimes times(Sampler sampler, int batch);
    // The plans to time over `batch` slots, the narrowest first. Their windows have at most half the capacity, so that
    // there is room for them at most times. None if a single width is left, from which no line can be drawn: a batch
    // then counts as a window of as many rows.
    std::vector<Plan> timed_plans(int batch) const;

    Runner& runner_;
    std::map<int, std::vector<Plan>> plans_;  // the plans to time, by batch size
    std::map<Sampler, PlanTuner> tuners_;
};

}  // namespace pass
