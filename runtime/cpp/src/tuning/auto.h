// `--plan auto`: how long passes take, how often drafts are accepted, and which plan writes the
// most tokens per second. It is told and asked, and runs nothing. As pass_runtime/tuning/auto.py.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/capabilities.h"
#include "backends/drafts.h"
#include "bundle/manifest.h"
#include "bundle/window.h"
#include "pass/options.hpp"

namespace pass {

// Seconds of a monotonic clock.
double now();

// How often draft i of a chain is accepted if all drafts before it are.
class Acceptance {
   public:
    // weight: how many passes the initial rates count for.
    explicit Acceptance(std::vector<double> prior, double weight = 10.0);

    std::vector<double> rates() const;
    // [L+1]: the probabilities that the first i drafts are all accepted.
    std::vector<double> cumulative() const;
    // [L+1]: tokens of a pass that verifies the first i drafts, the bonus token included.
    std::vector<double> expected() const;
    void record(int drafted, int accepted);
    // After a pass without such drafts, the rates drift back to the initial ones.
    void forget();

   private:
    void move_towards(std::size_t i, double rate, double share);

    // By position; the last two are weighted counts.
    std::vector<double> prior_, hits_, trials_;
};

// In one sequence, or in all; of n-gram drafts by confidence.
class Rates {
   public:
    explicit Rates(Acceptance lookahead) : lookahead_(std::move(lookahead)) {}
    // Begins with the rates of all sequences, `all`.
    explicit Rates(Rates& all) : all_(&all), lookahead_(all.lookahead_.rates()) {}

    // confidence: of `CopiedDrafts`; none for look-ahead drafts.
    Acceptance& of(std::optional<int> confidence = {});

   private:
    Rates* all_ = nullptr;
    Acceptance lookahead_;
    std::map<int, Acceptance> by_confidence_;
};

// One sequence before a pass. num_drafts: in its window. ngram: drafts that could replace them.
// rates: null if `auto` does not need them.
struct DraftState {
    int num_drafts = 0;
    CopiedDrafts ngram;
    Rates* rates = nullptr;
};

// What a pass did with the drafts of one sequence. confidence: none for look-ahead drafts.
struct Verified {
    int drafted = 0, accepted = 0;
    std::optional<int> confidence;
    Rates* rates = nullptr;
};

struct PassSeconds {
    double trunk = 0, tail = 0;
};

// For all slots together: rows of the windows, rows from which tokens are sampled, and drafts for
// the next windows.
struct PassShape {
    int rows = 0, sampled = 0, drafts = 0;

    auto operator<=>(const PassShape&) const = default;
};

inline PassShape shape_of(const Window& window, int batch = 1) {
    return {batch * window.width(), batch * (window.drafts + 1), batch * window.next().drafts};
}

using TimedPasses = std::map<PassShape, PassSeconds>;

// A piecewise linear function that never falls.
using Line = std::function<double(int)>;

// Seconds of a pass by its shape: an estimate from timed passes, times a ratio for this shape,
// times the slowness of all passes.
class PassTimes {
   public:
    // other_sampler: null or the times with another sampler, whose estimate of the trunk is scaled
    // to match `timed`, so that few shapes are enough.
    explicit PassTimes(const TimedPasses& timed, const PassTimes* other_sampler = nullptr);

    double seconds(const PassShape& shape) const;
    // The first passes of a shape correct mostly its ratio, later ones the slowness of all shapes.
    void record(const PassShape& shape, double seconds);
    int max_rows() const { return max_rows_; }
    double slowness() const { return slowness_; }

   private:
    double trunk_seconds(const PassShape& shape) const;

    int max_rows_ = 0;  // of the passes that were timed
    double slowness_ = 1.0;
    // The estimate is their sum.
    Line trunk_;    // by rows
    Line adapter_;  // the trunk's extra time if the pass makes drafts, by rows
    Line tail_;     // by sampled rows
    Line drafts_;   // the tail's extra time, by drafts
    std::map<PassShape, double> ratios_;
    std::map<PassShape, int> passes_;  // how many were recorded
};

// The windows to time: pass times are nearly linear in between.
std::vector<Window> probe_windows(int lookahead, int batch = 1,
                                  const std::vector<Window>& verifying = {});

// `ar`, and the plans of at most `lookahead` drafts that `auto` chooses from. capabilities: none
// allows every plan.
std::vector<Plan> plans_up_to(int lookahead, const std::optional<Capabilities>& capabilities = {});

// Of a pass, if passes accept independently of each other. cumulative [L+1]: the probabilities that
// the first i drafts are accepted.
double expected_tokens(const Plan& plan, const std::vector<double>& cumulative);

// tokens: expected of a pass in each sequence. seconds: of a pass over the batch.
struct Choice {
    Plan plan;
    double tokens = 0;
    double seconds = 0;

    double rate() const { return tokens / seconds; }  // tokens per second and sequence
};

// For one sampler.
class Tuner {
   public:
    // acceptance: cumulative, as the bundle states it; may be empty.
    Tuner(PassTimes times, int lookahead, const std::vector<double>& acceptance,
          std::optional<Capabilities> capabilities = {});

    Rates& rates() { return rates_; }                                       // of all sequences
    const std::map<int, PassTimes>& by_batch() const { return by_batch_; }  // those timed
    void add_batch(int batch, const PassTimes& times) { by_batch_.emplace(batch, times); }
    double seconds(const Window& window, int batch = 1) const {
        return by_batch_.at(timed_batch(batch)).seconds(shape_of(window, batch));
    }

    // verified: of each sequence.
    void observe(const Window& window, int batch, double seconds,
                 const std::vector<Verified>& verified = {});
    // The last decision, or a plan on trial. Decides from time to time, and at once for a new
    // look-ahead or batch.
    Choice choose(int lookahead, int batch, const std::vector<DraftState>& states);
    // The fastest first, without windows wider than those timed.
    std::vector<Choice> choices(int lookahead, int batch,
                                const std::vector<double>& cumulative) const;

    // To those in its window.
    bool prefers_ngrams(const DraftState& state, const Window& window);
    // Of `windows`, the one that writes tokens faster than the chosen plan; else null. If it
    // interrupts a fused plan with a copy that is not accepted whole, the next pass has no
    // look-ahead drafts: what they would have brought is subtracted.
    const Window* verifying(const Choice& choice, int batch, const std::vector<DraftState>& states,
                            const Window& next_of_plan, const std::vector<Window>& windows);
    // Lets the rates of drafts that the pass left out drift back, else they stay low for ever.
    void forget_unverified(const DraftState& state);

   private:
    // `trial` is tried until `passes_` reaches `trial_end`.
    struct Decision {
        Choice decided, trial;
        std::int64_t trial_end = 0;
    };

    // If passes over the batch were not timed, it counts as one window with as many rows.
    int timed_batch(int batch) const { return by_batch_.contains(batch) ? batch : 1; }
    void decide(int lookahead, int batch, const std::vector<DraftState>& states);

    std::map<int, PassTimes> by_batch_;
    std::optional<Capabilities> capabilities_;
    Rates rates_;
    Choice decided_;
    std::map<std::pair<int, int>, Decision> decisions_;  // by look-ahead and batch
    // What `passes_` was, by the window's name and batch.
    std::map<std::pair<std::string, int>, std::int64_t> last_ran_;
    std::int64_t passes_ = 0;
    std::int64_t decided_at_ = 0;  // what `passes_` was at the last decision
    double pass_seconds_ = 0;      // of all passes so far
    double due_seconds_ = 0;       // the next decision waits until `pass_seconds_` reaches this
};

// The tuners of a session, one for each sampler. Passes of all widths are timed with the first
// sampler; with later ones, those that show how their tails differ. What is timed does not depend
// on the room that sequences leave.
class Auto {
   public:
    using TimePass = std::function<PassSeconds(const Window&, int batch)>;

    Auto(const LookaheadInfo& lookahead, Capabilities capabilities);

    bool is_timed(Sampler sampler, int batch) const;
    // Times passes over `batch` slots if that was not done. Null if their windows need more than
    // `room` cache entries, or half the KV capacity is too small to compare two.
    Tuner* tuner(Sampler sampler, int batch, std::int64_t room, const TimePass& time);

   private:
    void time_passes(Sampler sampler, int batch, const TimePass& time);

    LookaheadInfo lookahead_;
    Capabilities capabilities_;
    // To time, by batch size. Empty if all have the same width, which tells nothing of others.
    std::map<int, std::vector<Window>> windows_;
    std::map<Sampler, Tuner> tuners_;
};

}  // namespace pass
