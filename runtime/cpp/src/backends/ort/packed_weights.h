// Finds packed weights: weights in the form that ONNX Runtime's CPU kernels read, in files that all
// sessions and processes map. Python's packed_weights.py and packing.py write and explain them.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "backends/ort/kernels.h"
#include "backends/ort/library.h"
#include "bundle/manifest.h"

namespace pass {

// The CPU's model and instructions: lines `field: value` of Linux. Empty without the instructions.
std::string describe_cpu(const std::filesystem::path& cpu_info = "/proc/cpuinfo");

// The path of the bundle's trunk `file` with packed weights. None if the user's cache directory has
// no intact one, or the hash cache does not have the hashes of the bundle's files.
std::optional<std::filesystem::path> packed_trunk(const OrtLibrary& library,
                                                  const std::filesystem::path& bundle,
                                                  const Manifest& manifest, const std::string& file,
                                                  const Kernels& kernels);

}  // namespace pass
