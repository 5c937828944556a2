#include "pass/event.hpp"

#include <algorithm>

namespace pass {

namespace {

// a / b, or 0 if b is 0.
double quotient(double a, double b) { return b != 0 ? a / b : 0.0; }

}  // namespace

void Stats::record(int drafts, int count) {
    passes += 1;
    emitted += count;
    if (drafts == 0) return;
    steps += 1;
    drafted += drafts;
    accepted += count - 1;  // all but the bonus token
    histogram.resize(std::max(histogram.size(), static_cast<std::size_t>(count)));
    histogram[static_cast<std::size_t>(count - 1)] += 1;
}

double Stats::tau() const {
    return quotient(static_cast<double>(emitted), static_cast<double>(passes));
}

double Stats::mean_acceptance_length() const {
    return 1 + quotient(static_cast<double>(accepted), static_cast<double>(steps));
}

double Stats::draft_acceptance_rate() const {
    return quotient(static_cast<double>(accepted), static_cast<double>(drafted));
}

std::vector<double> Stats::acceptance_per_position() const {
    std::vector<double> rates;
    if (steps == 0) return rates;
    for (std::size_t i = 0; i < static_cast<std::size_t>(lookahead); ++i) {
        std::int64_t steps_that_accepted = 0;  // draft i, and so all drafts before it
        for (std::size_t count = i + 1; count < histogram.size(); ++count)
            steps_that_accepted += histogram[count];
        rates.push_back(static_cast<double>(steps_that_accepted) / static_cast<double>(steps));
    }
    return rates;
}

std::vector<std::int64_t> Stats::acceptance_histogram() const {
    if (steps == 0) return {};
    std::vector<std::int64_t> counts = histogram;
    counts.resize(static_cast<std::size_t>(lookahead) + 1);
    return counts;
}

double Stats::decode_tokens_per_second() const {
    return quotient(static_cast<double>(generated_tokens), decode_seconds);
}

}  // namespace pass
