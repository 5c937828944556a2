// When n-gram drafts are verified with --plan auto.
#pragma once

#include <utility>
#include <vector>

#include "decode/draft_policy.h"
#include "tuning/tuner.h"

namespace pass {

// Verifies n-gram drafts if their pass is expected to write more tokens per second than the
// candidate that the tuner chose.
class ExpectedRate : public DraftPolicy {
   public:
    ExpectedRate(Tuner& tuner, const Candidate& candidate, int batch)
        : tuner_(tuner), candidate_(candidate), batch_(batch) {}
    bool prefers_ngrams(const DraftState& state, const Plan& plan) override;
    int ngram_count(const std::vector<DraftState>& states, const Plan* cycle_plan,
                    const std::vector<Plan>& plans) override;

   private:
    // The fastest of `plans`, which verify 1, 2, ... n-gram drafts: its expected tokens per second,
    // of all sequences together, and how many drafts it verifies. Without plans, both are 0.
    std::pair<double, int> fastest(const std::vector<DraftState>& states,
                                   const std::vector<Plan>& plans);

    Tuner& tuner_;
    const Candidate& candidate_;
    int batch_;
};

}  // namespace pass
