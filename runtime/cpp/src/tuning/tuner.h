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

// Switch to a cycle only if its expected rate is at least this many times the present cycle's.
inline constexpr double switch_margin = 1.03;

// A cycle of the menu. tokens: how many tokens a pass is expected to write in each sequence.
// seconds: how long a pass over the whole batch is expected to take.
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

    // Pass times by batch size, as far as they were timed.
    const std::map<int, PassTimes>& by_batch() const { return by_batch_; }
    void add_batch(int batch, PassTimes times) { by_batch_.emplace(batch, std::move(times)); }
    // The times of passes over `batch` slots. If these were not timed, the times of passes over one
    // slot, by which a pass over the batch counts as one window with as many rows.
    const PassTimes& times(int batch) const {
        return by_batch_.at(by_batch_.contains(batch) ? batch : 1);
    }
    double plan_seconds(const Plan& plan, int batch = 1) const {
        return times(batch).seconds(shape_of(plan, batch));
    }
    // Record that a pass of `plan` over `batch` slots took `seconds`.
    void observe(const Plan& plan, int batch, double seconds);

    ConditionalAcceptance& lookahead_acceptance() { return lookahead_acceptance_; }
    // The acceptance of n-gram drafts after a match of `match_length` tokens. own: the acceptances
    // of one sequence, by the length of the match; null: return that of all sequences together.
    ConditionalAcceptance& ngram(int match_length,
                                 std::map<int, ConditionalAcceptance>* own = nullptr);
    // The acceptance of a new sequence, which starts with the rates of all sequences.
    ConditionalAcceptance new_acceptance() const {
        return ConditionalAcceptance(lookahead_acceptance_.rates());
    }

    // The candidate for the next pass: that of the last decision, or one that is on trial. A
    // decision is made from time to time, and at once for a new look-ahead or batch size.
    // acceptances: of look-ahead drafts, in each sequence that runs.
    Candidate next_candidate(int lookahead, int batch,
                             const std::vector<const ConditionalAcceptance*>& acceptances);
    // The menu for `lookahead`, the fastest cycle first, without windows wider than those timed.
    // cumulative: as for `expected_tokens`.
    std::vector<Candidate> candidates(int lookahead, int batch,
                                      const std::vector<double>& cumulative) const;

   private:
    // The candidate that was decided for, and the one that is tried first.
    struct Decision {
        Candidate decided, trial;
        std::int64_t trial_end = 0;  // the trial ends when passes_ reaches this
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
    std::map<std::pair<int, int>, Decision> decisions_;  // by look-ahead and batch
    // What `passes_` was when a plan last ran, by its name and batch.
    std::map<std::pair<std::string, int>, std::int64_t> last_ran_;
    std::int64_t passes_ = 0;      // how many passes ran so far
    std::int64_t decided_at_ = 0;  // what `passes_` was at the last decision
    double pass_seconds_ = 0;      // of all passes so far
    double due_seconds_ = 0;       // the next decision waits until `pass_seconds_` reaches this
};

// The tuners of a session, one for each sampler, made for the first request with that sampler. For
// the first sampler, passes of all widths are timed at each batch size. Later samplers use its
// times of the trunk, so only passes that show how their tails differ are timed.
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
    // Whether the KV cache has room for the passes that are timed with one and with `batch` slots.
    bool fits(int batch) const;
    // Time passes: only a few if another sampler was timed at this batch size.
    PassTimes times(Sampler sampler, int batch);
    // The plans to time over `batch` slots; the first is the narrowest. Their windows take at most
    // half the capacity, so that texts have the other half. Empty if all have the same width, from
    // which the times of other widths cannot be estimated.
    std::vector<Plan> timed_plans(int batch) const;

    Runner& runner_;
    std::map<int, std::vector<Plan>> plans_;  // to time, by batch size
    std::map<Sampler, Tuner> tuners_;
};

}  // namespace pass
