// The JSON objects that commands print. Their keys are those of the objects that pass-run prints.
#pragma once

#include <nlohmann/json.hpp>

#include "pass/pass.hpp"

namespace pass::cli {

using Json = nlohmann::ordered_json;

Json to_json(const Stats& stats);

// A request that has ended: its tokens, text, metrics, and log-probabilities if it asked for them.
Json to_json(const Generation& generation);

}  // namespace pass::cli
