// What the Python runtime did, done again.
//
// A scene is a line of what scripts/golden_traces.py writes: {"name", "slots", "capacity", "compare", "requests":
// [{"prompt_ids", "round", ...}], "results": [...]}. A request is submitted before the round of its number, and
// cancelled before its "cancel_round".
#pragma once

#include <ostream>
#include <vector>

#include "json.h"

namespace pass::cli {

// The results of a scene's requests on `session`, which has the scene's slots. Throws what failed.
std::vector<Json> play(const Json& scene, Session& session);

// Says what differs from the scene's results, to the last bit; returns how much does.
int compare(const Json& scene, const std::vector<Json>& results, std::ostream& differences);

}  // namespace pass::cli
