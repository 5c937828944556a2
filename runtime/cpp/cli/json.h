// What commands say in JSON: the objects of pass-run.
#pragma once

#include <nlohmann/json.hpp>

#include "pass/pass.hpp"

namespace pass::cli {

using Json = nlohmann::ordered_json;

// Every figure.
Json to_json(const Stats& stats);

// What a finished request did.
Json to_json(const Generation& generation);

}  // namespace pass::cli
