// Replays requests that the Python runtime decoded.
//
// A scene is a line of what scripts/golden_traces.py writes: {"name", "slots", "capacity", "compare", "requests":
// [{"prompt_ids", "round", ...}], "results": [...]}. A request is submitted before the step with
// the number "round", and cancelled before the step "cancel_round".
#pragma once

#include <ostream>
#include <vector>

#include "json.h"

namespace pass::cli {

// The results of a scene's requests on `session`, which has as many slots as the scene. Throws the error of a request.
std::vector<Json> play(const Json& scene, Session& session);

// Writes what differs from the scene's results, to the last bit, to `differences`; returns the number of differences.
int compare(const Json& scene, const std::vector<Json>& results, std::ostream& differences);

}  // namespace pass::cli
