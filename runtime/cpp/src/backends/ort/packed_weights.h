// Finds weights in the form that ONNX Runtime's CPU kernels read, in files that all sessions and
// processes map. Python writes and explains them (pass_runtime/backends/ort/packed_weights.py,
// packing.py).
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

// The path of the bundle's trunk `file` with packed weights. None if the user's cache directory has
// no intact entry for it, or if the hash cache lacks the hashes of the bundle's files. kernels: of
// this CPU.
std::optional<std::filesystem::path> packed_trunk(const OrtLibrary& library,
                                                  const std::filesystem::path& bundle,
                                                  const Manifest& manifest, const std::string& file,
                                                  const Kernels& kernels);

}  // namespace pass
