// Weights as ONNX Runtime's CPU kernels read them, in files that all sessions and processes map. The Python runtime
// writes them, and says what an entry is (pass_runtime/backends/ort/packed_weights.py, weight_key.py); here they are
// only read.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "backends/ort/library.h"
#include "bundle/manifest.h"

namespace pass {

// What Linux tells of the kinds of cores: lines `field: value`, each once. Empty if it does not tell their
// instructions.
std::string describe_cpu(const std::filesystem::path& cpu_info = "/proc/cpuinfo");

// The graph whose weights are the packed ones of the bundle's trunk `file`; none if there is no entry, if it is
// not intact, or if it is not known that the bundle's files are those of the manifest.
std::optional<std::filesystem::path> packed_trunk(const OrtLibrary& library, const std::filesystem::path& bundle,
                                                  const Manifest& manifest, const std::string& file);

}  // namespace pass
