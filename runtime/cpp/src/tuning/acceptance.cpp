#include "tuning/acceptance.h"

#include <algorithm>
#include <cstddef>

namespace pass {

namespace {

constexpr double memory = 200.0;  // how many passes a rate is averaged over

}  // namespace

Acceptance::Acceptance(std::vector<double> prior, double weight)
    : prior_(std::move(prior)), trials_(prior_.size(), weight) {
    for (double rate : prior_) hits_.push_back(rate * weight);
}

std::vector<double> Acceptance::rates() const {
    std::vector<double> found;
    for (std::size_t i = 0; i < hits_.size(); ++i) found.push_back(hits_[i] / trials_[i]);
    return found;
}

void Acceptance::record(int drafted, int accepted) {
    drafted = std::min(drafted, static_cast<int>(prior_.size()));
    for (int i = 0; i < std::min(accepted + 1, drafted); ++i) {
        const auto at = static_cast<std::size_t>(i);
        hits_[at] = (hits_[at] + (i < accepted ? 1 : 0)) * (1 - 1 / memory);
        trials_[at] = (trials_[at] + 1) * (1 - 1 / memory);
    }
    // Where all drafts were accepted, one more is worth a try.
    const auto next = static_cast<std::size_t>(drafted);
    if (drafted > 0 && drafted == accepted && next < prior_.size()) {
        move_towards(next, hits_[next - 1] / trials_[next - 1], 1 / memory);
    }
}

void Acceptance::forget() {
    for (std::size_t i = 0; i < prior_.size(); ++i) move_towards(i, prior_[i], 1 / (8 * memory));
}

void Acceptance::move_towards(std::size_t i, double rate, double share) {
    hits_[i] += (rate * trials_[i] - hits_[i]) * share;
}

std::vector<double> cumulative_acceptance(const std::vector<double>& rates) {
    std::vector<double> cumulative{1.0};
    for (double rate : rates) cumulative.push_back(cumulative.back() * rate);
    return cumulative;
}

}  // namespace pass
