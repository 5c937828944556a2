#include "tuning/group_sizes.h"

#include <algorithm>
#include <numeric>

#include "tuning/linear.h"

namespace pass {

namespace {

constexpr int max_drafts = 8;   // more drafts than this are not tried
constexpr int every_shape = 3;  // up to this many drafts every shape is tried
constexpr int exhaustive = 5;   // up to this many every shape that never increases

// The probability that exactly `accepted` of `drafts` drafts are accepted.
double accepted_given(int drafts, int accepted, const std::vector<double>& cumulative) {
    const auto reached = [&](int i) {
        return i <= drafts && i < static_cast<int>(cumulative.size()) ? cumulative[static_cast<std::size_t>(i)] : 0.0;
    };
    return reached(accepted) - reached(accepted + 1);
}

// Append to `found` all sequences of `length` entries of `sizes`, which decrease. falling: only sequences that never
// increase.
void enumerate(const std::vector<int>& sizes, int length, bool falling, std::vector<int>& begun,
               std::vector<std::vector<int>>& found, std::size_t from = 0) {
    if (length == 0) {
        found.push_back(begun);
        return;
    }
    for (std::size_t i = falling ? from : 0; i < sizes.size(); ++i) {
        begun.push_back(sizes[i]);
        enumerate(sizes, length - 1, falling, begun, found, i);
        begun.pop_back();
    }
}

}  // namespace

// The drafts accepted in successive passes are a Markov chain: `a` of them leave groups[a] drafts, of which the next
// pass accepts a' with the probability accepted_given. Its stationary distribution x solves x T = x.
double fused_tokens(const std::vector<int>& groups, const std::vector<double>& cumulative) {
    const std::size_t depth = groups.size();
    Matrix rows(depth, std::vector<double>(depth + 1, 0.0));
    for (std::size_t after = 0; after + 1 < depth; ++after) {
        for (std::size_t before = 0; before < depth; ++before) {
            rows[after][before] = accepted_given(groups[before], static_cast<int>(after), cumulative);
        }
        rows[after][after] -= 1.0;
    }
    rows.back().assign(depth + 1, 1.0);  // one equation is redundant; the probabilities add up to one
    const std::vector<double> stationary = solve(std::move(rows));
    double tokens = 1;
    for (std::size_t i = 0; i < depth; ++i) tokens += stationary[i] * static_cast<double>(i);
    return tokens;
}

double two_pass_tokens(int drafts, const std::vector<double>& cumulative) {
    return 1 + std::accumulate(cumulative.begin() + 1, cumulative.begin() + 1 + drafts, 0.0) / 2;
}

std::vector<std::vector<int>> group_shapes(int drafts) {
    std::vector<int> sizes;
    for (int size = drafts; size >= 0; --size) {
        if (drafts <= exhaustive || size == drafts || size == 4 || size <= 2) sizes.push_back(size);
    }
    std::vector<std::vector<int>> found;
    std::vector<int> begun;
    if (drafts <= every_shape) {
        enumerate(sizes, drafts + 1, false, begun, found);
        std::erase_if(found, [](const std::vector<int>& groups) { return groups.front() == 0; });
        return found;
    }
    begun.push_back(drafts);
    enumerate(sizes, drafts, true, begun, found);
    for (std::size_t i = 0, falling = found.size(); i < falling; ++i) {
        std::vector<int> again = found[i];
        if (again.back() != 0 || again[again.size() - 2] >= drafts) continue;
        again.back() = drafts;
        found.push_back(std::move(again));
    }
    return found;
}

std::vector<int> full_shape(int drafts) { return std::vector<int>(static_cast<std::size_t>(drafts) + 1, drafts); }

std::optional<GroupChoice> best_shape(std::vector<double> cumulative, const std::function<double(int, int)>& seconds,
                                      int max_width, const std::function<std::vector<std::vector<int>>(int)>& shapes) {
    for (std::size_t i = 1; i < cumulative.size(); ++i) {
        cumulative[i] =
            std::min(cumulative[i], 0.999);  // certainty would make the Markov chain reducible: no unique solution
    }
    std::optional<GroupChoice> best;
    for (int drafts = 1; drafts <= std::min(static_cast<int>(cumulative.size()) - 1, max_drafts); ++drafts) {
        // A pass whose window always holds all drafts is the upper bound; shapes that cannot win even so are skipped.
        const double most = std::accumulate(cumulative.begin(), cumulative.begin() + drafts + 1, 0.0);
        const double before = best ? best->rate() : 0.0;
        for (std::vector<int>& groups : shapes(drafts)) {
            const int width = 1 + drafts + std::accumulate(groups.begin(), groups.end(), 0);
            if (width > max_width) continue;
            const double cost = seconds(width, drafts);
            if (most / cost <= before) continue;
            GroupChoice choice{std::move(groups), 0, cost};
            choice.tokens = fused_tokens(choice.groups, cumulative);
            if (!best || choice.rate() > best->rate()) best = std::move(choice);
        }
    }
    return best;
}

}  // namespace pass
