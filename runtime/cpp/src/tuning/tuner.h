// --plan auto: chooses the plan with the most expected tokens per second, from the times of passes
// and the acceptance.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "backends/capabilities.h"
#include "decode/runner.h"
#include "tuning/estimates.h"

namespace pass {

// Switch to a cycle only if its expected rate is at least this many times that of the current
// cycle. Switch to plain decoding if the current cycle's rate is below this many times that of
// plain decoding.
inline constexpr double switch_margin = 1.03;

// A cycle of plans. tokens: that a pass is expected to write for each sequence. seconds: of a pass
// over the whole batch.
struct Candidate {
    Cycle cycle;
    double tokens = 0;
    double seconds = 0;

    double rate() const { return tokens / seconds; }  // expected tokens per second and sequence
};

// Pass times and acceptance of drafts for one sampler. All requests of a session with that sampler
// share them.
class PlanTuner {
   public:
    // acceptance: the cumulative acceptance by position that the bundle states for this sampler;
    // empty if it states none. capabilities: as for `menu`.
    PlanTuner(PassTimes times, int lookahead, const std::vector<double>& acceptance,
              std::optional<Capabilities> capabilities = {});

    // The times of passes by batch size.
    const std::map<int, PassTimes>& by_batch() const { return by_batch_; }
    void add_batch(int batch, PassTimes times) { by_batch_.emplace(batch, std::move(times)); }
    // A batch size that was not timed counts as one window with as many rows.
    const PassTimes& times(int batch) const {
        return by_batch_.at(by_batch_.contains(batch) ? batch : 1);
    }
    double plan_seconds(const Plan& plan, int batch = 1) const {
        return times(batch).seconds(shape_of(plan, batch));
    }
    // Record that a pass of `plan` over `batch` slots took `seconds`.
    void observe(const Plan& plan, int batch, double seconds);

    ConditionalAcceptance& lookahead_drafts() { return lookahead_drafts_; }
    // The acceptance of n-gram drafts after a match of `matched` tokens. own: those of one
    // sequence, by `matched`; null for all sequences together.
    ConditionalAcceptance& ngram(int matched, std::map<int, ConditionalAcceptance>* own = nullptr);
    // The acceptance of a new sequence, which starts with the rates of all sequences.
    ConditionalAcceptance new_acceptance() const {
        return ConditionalAcceptance(lookahead_drafts_.rates());
    }

    // The candidate for the next pass, decided anew from time to time, and at once for a new
    // look-ahead or batch size.
    Candidate next_candidate(int lookahead, int batch,
                             const std::vector<const ConditionalAcceptance*>& acceptances);
    // The menu, with drafts at most `lookahead` deep and windows not wider than those that were
    // timed; best first.
    std::vector<Candidate> candidates(int lookahead, int batch,
                                      const std::vector<double>& cumulative) const;

   private:
    struct Decision {
        Candidate decided, trial;
        std::int64_t ends = 0;  // after so many passes of the tuner the trial ends
    };
    Decision decide(int lookahead, int batch,
                    const std::vector<const ConditionalAcceptance*>& acceptances);

    std::map<int, PassTimes> by_batch_;
    int lookahead_;
    std::optional<Capabilities> capabilities_;
    mutable std::map<int, std::vector<Cycle>> menus_;  // by look-ahead
    ConditionalAcceptance lookahead_drafts_;
    std::map<int, ConditionalAcceptance> ngrams_;
    Candidate decided_;
    std::map<std::pair<int, int>, Decision> decisions_;  // by look-ahead and batch
    // by plan and batch: the number of its last pass
    std::map<std::pair<std::string, int>, std::int64_t> last_ran_;
    // number of passes so far; at the last decision
    std::int64_t passes_ = 0, decided_at_ = 0;
    // seconds of passes so far; how many the next decision waits for
    double decoding_ = 0, due_ = 0;
};

// The tuners of a session, each made for the first request with its sampler. Passes of all widths
// are timed for the first sampler and for each new batch size, and for later samplers only those
// that show how their tails differ.
//
// Which passes are timed depends on the bundle, the engine and the capacity alone, not on the room
// that running sequences leave in the KV cache: with too little room, timing is put off.
class Tuners {
   public:
    explicit Tuners(Runner& runner);

    // Whether `get` would have nothing left to time.
    bool is_timed(Sampler sampler, int batch) const;

    // The tuner for `sampler`, which knows the times of passes over `batch` slots. Null if passes
    // must be timed first, but their windows do not fit into the KV cache after the running
    // sequences; always null if half the KV capacity is too small for windows of two widths.
    PlanTuner* get(Sampler sampler, int batch);

   private:
    // Whether the KV cache has room now for the passes that are timed with one slot and with
    // `batch` slots.
    bool fits(int batch) const;
    // Time passes; few of them if the times of this batch size are known for another sampler.
    PassTimes times(Sampler sampler, int batch);
    // The plans to time over `batch` slots; the first is the narrowest. Their windows take at most
    // half the capacity, so that texts have the other half. Empty if only one width would be left,
    // from which no other can be estimated: the batch then counts as one window with as many rows.
    std::vector<Plan> timed_plans(int batch) const;

    Runner& runner_;
    std::map<int, std::vector<Plan>> plans_;  // the plans to time, by batch size
    std::map<Sampler, PlanTuner> tuners_;
};

}  // namespace pass
