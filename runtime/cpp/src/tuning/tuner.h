// --plan auto: chooses the cycle with the most expected tokens per second.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "backends/capabilities.h"
#include "decode/runner.h"
#include "tuning/estimates.h"

namespace pass {

// Switch to a cycle only if its expected rate is at least this many times the current cycle's, and
// to plain decoding if the current rate is below this many times that of plain decoding.
inline constexpr double switch_margin = 1.03;

// A cycle of the menu. tokens: how many a pass is expected to write for each sequence. seconds: of
// a pass over the whole batch.
struct Candidate {
    Cycle cycle;
    double tokens = 0;
    double seconds = 0;

    double rate() const { return tokens / seconds; }  // expected tokens per second and sequence
};

// Pass times and acceptance of drafts for one sampler, over all requests of a session.
class Tuner {
   public:
    // acceptance: the cumulative acceptance that the bundle states for this sampler; may be empty.
    // capabilities: as for `menu`.
    Tuner(PassTimes times, int lookahead, const std::vector<double>& acceptance,
          std::optional<Capabilities> capabilities = {});

    // Pass times by batch size.
    const std::map<int, PassTimes>& by_batch() const { return by_batch_; }
    void add_batch(int batch, PassTimes times) { by_batch_.emplace(batch, std::move(times)); }
    // A batch whose size was not timed counts as one window with as many rows.
    const PassTimes& times(int batch) const {
        return by_batch_.at(by_batch_.contains(batch) ? batch : 1);
    }
    double plan_seconds(const Plan& plan, int batch = 1) const {
        return times(batch).seconds(shape_of(plan, batch));
    }
    // Record that a pass of `plan` over `batch` slots took `seconds`.
    void observe(const Plan& plan, int batch, double seconds);

    ConditionalAcceptance& lookahead_acceptance() { return lookahead_acceptance_; }
    // The acceptance of n-gram drafts after a match of `match_length` tokens: in the sequence of
    // `own` (its acceptance by `match_length`), or in all sequences if `own` is null.
    ConditionalAcceptance& ngram(int match_length,
                                 std::map<int, ConditionalAcceptance>* own = nullptr);
    // The acceptance of a new sequence, which starts with the rates of all sequences.
    ConditionalAcceptance new_acceptance() const {
        return ConditionalAcceptance(lookahead_acceptance_.rates());
    }

    // The candidate for the next pass. It is decided anew from time to time, and at once for a new
    // look-ahead or batch size. acceptances: of look-ahead drafts in each sequence that runs.
    Candidate next_candidate(int lookahead, int batch,
                             const std::vector<const ConditionalAcceptance*>& acceptances);
    // The menu, the fastest first, without deeper drafts and windows wider than those timed.
    std::vector<Candidate> candidates(int lookahead, int batch,
                                      const std::vector<double>& cumulative) const;

   private:
    struct Decision {
        Candidate decided, trial;
        std::int64_t ends = 0;  // the trial ends when passes_ is this
    };
    Decision decide(int lookahead, int batch,
                    const std::vector<const ConditionalAcceptance*>& acceptances);

    std::map<int, PassTimes> by_batch_;
    int lookahead_;
    std::optional<Capabilities> capabilities_;
    mutable std::map<int, std::vector<Cycle>> menus_;  // by look-ahead
    ConditionalAcceptance lookahead_acceptance_;
    std::map<int, ConditionalAcceptance> ngrams_;
    Candidate decided_;
    std::map<std::pair<int, int>, Decision> decisions_;             // by look-ahead and batch
    std::map<std::pair<std::string, int>, std::int64_t> last_ran_;  // passes_, by plan and batch
    std::int64_t passes_ = 0, decided_at_ = 0;  // passes so far; their number at the last decision
    double decoding_ = 0, due_ = 0;  // seconds of all passes; the next decision waits for due_
};

// The tuners of a session, each made for the first request with its sampler. Passes of all widths
// are timed for the first sampler, at each batch size; later samplers share the trunk's times, so
// only passes that show how their tails differ are timed.
//
// Which passes are timed depends on the bundle, the engine and the capacity alone, not on the room
// that running sequences leave in the KV cache: with too little room, timing is put off.
class Tuners {
   public:
    explicit Tuners(Runner& runner);

    // Whether `get` would have nothing left to time.
    bool is_timed(Sampler sampler, int batch) const;

    // The tuner for `sampler`, with the times of passes over `batch` slots. Null if passes must be
    // timed first, but their windows do not fit into the KV cache after the running sequences;
    // always null if half the KV capacity is too small for windows of two widths.
    Tuner* get(Sampler sampler, int batch);

   private:
    // Whether the KV cache has room for the passes to time with one slot and with `batch` slots.
    bool fits(int batch) const;
    // Time passes, only a few if another sampler's times for this batch size are known.
    PassTimes times(Sampler sampler, int batch);
    // The plans to time over `batch` slots; the first is the narrowest. Their windows take at most
    // half the capacity, so that texts have the other half. Empty if they have one width, from
    // which no other can be estimated.
    std::vector<Plan> timed_plans(int batch) const;

    Runner& runner_;
    std::map<int, std::vector<Plan>> plans_;  // to time, by batch size
    std::map<Sampler, Tuner> tuners_;
};

}  // namespace pass
