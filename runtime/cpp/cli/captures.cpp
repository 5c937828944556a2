#include "captures.h"

namespace pass::cli {

std::string captures_of(const std::string& device, const std::map<std::string, std::string>& uncaptured) {
    std::string lines;
    for (const auto& [name, reason] : uncaptured) lines += name + " ran without a CUDA graph: " + reason + "\n";
    if (device != "cpu" && lines.empty()) lines = "passes were captured as CUDA graphs\n";
    return lines;
}

}  // namespace pass::cli
