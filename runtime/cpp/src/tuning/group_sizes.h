// The expected tokens per pass of each plan, and the group sizes of fused plans that decode fastest. Pure arithmetic.
//
// cumulative[i] is the cumulative acceptance: the probability that the drafts 1..i of a window are all accepted, with
// cumulative[0] = 1. Drafts of different passes are assumed to be independent.
#pragma once

#include <functional>
#include <optional>
#include <vector>

namespace pass {

// Group sizes of a fused plan, its expected tokens per pass, and the seconds of a pass.
struct GroupChoice {
    std::vector<int> groups;
    double tokens = 0;
    double seconds = 0;

    double rate() const { return tokens / seconds; }
};

// Mean tokens per pass of a fused plan with these groups.
double fused_tokens(const std::vector<int>& groups, const std::vector<double>& cumulative);

// Mean tokens per pass of draft and verify passes in turn.
double two_pass_tokens(int drafts, const std::vector<double>& cumulative);

// The group sizes to try for `drafts` drafts: all possible ones up to three drafts; with more, those that never
// increase from group to group, and the same with a full last group.
std::vector<std::vector<int>> group_shapes(int drafts);

// The group sizes that leave `drafts` drafts whatever was accepted.
std::vector<int> full_shape(int drafts);

// The group sizes with the most tokens per second, among shapes(drafts) for every number of drafts; none where all have
// more than `max_width` rows. seconds(width, drafts): the time of a pass.
std::optional<GroupChoice> best_shape(std::vector<double> cumulative, const std::function<double(int, int)>& seconds,
                                      int max_width,
                                      const std::function<std::vector<std::vector<int>>(int)>& shapes = group_shapes);

}  // namespace pass
