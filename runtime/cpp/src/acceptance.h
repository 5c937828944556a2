// How well drafts do: running averages, which start from what training measured.
#pragma once

#include <vector>

namespace pass {

// The rate at which draft i is accepted once those before it were.
class Acceptance {
   public:
    explicit Acceptance(std::vector<double> prior);

    std::vector<double> rates() const;
    // One pass: `accepted` of `drafted` drafts. Old passes fade, towards nothing known.
    void record(int drafted, int accepted);
    // A pass without these drafts: drift slowly back to the prior, so that they are tried again one day.
    void forget();

   private:
    void lean(std::size_t i, double rate, double share);

    std::vector<double> prior_, hits_, trials_;
};

// [L] acceptance rates, each given that the drafts before it were accepted -> [L+1]: the probability that drafts 1..i
// are all accepted.
std::vector<double> chain_of(const std::vector<double>& rates);

}  // namespace pass
