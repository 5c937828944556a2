// Finds weights in the form that ONNX Runtime's CPU kernels read, in files that all sessions and
// processes map. Python's packed_weights.py and packing.py write and explain them.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "backends/ort/kernels.h"
#include "backends/ort/library.h"
#include "bundle/manifest.h"

namespace pass {

// What Linux reports of the CPU's cores and their instructions: lines `field: value`, each once.
// Empty if it reports no instructions.
std::string describe_cpu(const std::filesystem::path& cpu_info = "/proc/cpuinfo");

// The path of the bundle's trunk `file` with packed weights. None without an intact entry in the
// user's cache directory, or without hashes of the bundle's files in the hash cache.
std::optional<std::filesystem::path> packed_trunk(const OrtLibrary& library,
                                                  const std::filesystem::path& bundle,
                                                  const Manifest& manifest, const std::string& file,
                                                  const Kernels& kernels);

}  // namespace pass
