// What `bench` tells of CUDA graphs.
#pragma once

#include <map>
#include <string>

namespace pass::cli {

// Lines that name what ran on `device` without a CUDA graph, with the reasons; none on the CPU, which has no such
// graphs.
std::string captures_of(const std::string& device, const std::map<std::string, std::string>& uncaptured);

}  // namespace pass::cli
