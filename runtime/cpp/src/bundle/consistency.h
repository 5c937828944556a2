// Checks that the parts of a manifest agree: its model, tensors, plans and feeds.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bundle/manifest.h"
#include "bundle/plan.h"

namespace pass {

// The first contradiction, none where there is none.
std::optional<std::string> inconsistency(const Manifest& manifest);

// Every plan that a bundle with `lookahead` look-ahead rows has tails for.
std::vector<Plan> bundle_plans(int lookahead);

}  // namespace pass
