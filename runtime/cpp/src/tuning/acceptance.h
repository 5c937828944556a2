// Acceptance rates of drafts: running averages that start from what was measured in training.
#pragma once

#include <vector>

namespace pass {

// Conditional acceptance: the rate at which draft i is accepted when all drafts before it were.
class Acceptance {
   public:
    // weight: the number of passes that `prior` counts for.
    explicit Acceptance(std::vector<double> prior, double weight = 10.0);

    std::vector<double> rates() const;
    // Record that `accepted` of `drafted` drafts were accepted in a pass. The weight of earlier passes decays.
    void record(int drafted, int accepted);
    // After a pass without these drafts: move slowly back to the prior, so that they will be tried again.
    void forget();

   private:
    void move_towards(std::size_t i, double rate, double share);

    std::vector<double> prior_, hits_, trials_;
};

// Conditional acceptance rates [L] -> cumulative acceptance [L+1]: entry i is the probability that drafts 1..i are all
// accepted.
std::vector<double> cumulative_acceptance(const std::vector<double>& rates);

}  // namespace pass
