// The JSON objects that commands print, which are those of pass-run.
#pragma once

#include <nlohmann/json.hpp>

#include "pass/pass.hpp"

namespace pass::cli {

using Json = nlohmann::ordered_json;

// All metrics.
Json to_json(const Stats& stats);

// A finished request: its tokens, text and metrics.
Json to_json(const Generation& generation);

}  // namespace pass::cli
