// How many tokens a pass of each plan is worth, and the group sizes that are worth most. Pure arithmetic.
//
// chain[i] is the probability that drafts 1..i of a row of drafts are all accepted (chain[0] = 1). Drafts of one pass
// are taken as independent of those of another.
#pragma once

#include <functional>
#include <optional>
#include <vector>

namespace pass {

// Group sizes of a fused plan, its expected tokens per pass, and the seconds a pass takes.
struct Choice {
    std::vector<int> groups;
    double tokens = 0;
    double seconds = 0;

    double rate() const { return tokens / seconds; }
};

// Mean tokens per pass of a fused plan with these groups.
double fused_tokens(const std::vector<int>& groups, const std::vector<double>& chain);

// Mean tokens per pass of draft and verify passes in turn.
double two_pass_tokens(int drafts, const std::vector<double>& chain);

// Choices of group sizes with `drafts` rows after the root: all of them up to three drafts; beyond, falling ones, and
// the same with a full last group.
std::vector<std::vector<int>> group_shapes(int drafts);

// The group sizes that leave `drafts` drafts whatever was accepted.
std::vector<int> full_shape(int drafts);

// The fused plan of `shapes`, for each number of drafts, with the most tokens per second; none where none has at most
// `max_width` rows. seconds(width, drafts): of a pass.
std::optional<Choice> best_shape(std::vector<double> chain, const std::function<double(int, int)>& seconds,
                                 int max_width,
                                 const std::function<std::vector<std::vector<int>>(int)>& shapes = group_shapes);

}  // namespace pass
