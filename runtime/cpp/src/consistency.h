// Does a manifest contradict itself? Its numbers are checked against the tensors and plans that it lists.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "manifest.h"
#include "plan.h"

namespace pass {

// The first contradiction in a few words.
std::optional<std::string> inconsistency(const Manifest& manifest);

// Every plan that a bundle with `lookahead` rows has tails for.
std::vector<Plan> bundle_plans(int lookahead);

}  // namespace pass
