// Opens TensorRT's library, and chooses the engine set of a bundle that fits this machine.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "backends/cuda.h"
#include "backends/trt/api.h"
#include "bundle/manifest.h"

namespace pass {

// The manifest's name of the library, and the device's.
inline constexpr const char* tensorrt = "tensorrt";

// path: its file; empty: $PASS_TENSORRT, else the first that is found of the versions whose headers
// libpass was built with. Throws Error if the library cannot be opened, or libpass was built
// without the headers of its version.
std::unique_ptr<TrtApi> open_tensorrt(const std::filesystem::path& path);

// The newest engine set for `version` and `gpu`. Throws Error if none fits, or an engine is not the
// file that was built. verify: compare hashes. why_absent: why `gpu` is none.
const EngineSet& choose_engines(const std::filesystem::path& bundle, const Manifest& manifest,
                                const std::string& version, const std::optional<Gpu>& gpu,
                                bool verify, const std::string& why_absent);

// Why `engines` cannot run here; empty if they can.
std::string why_not(const EngineSet& engines, const Manifest& manifest, const std::string& version,
                    const Gpu& gpu);

// The directory with the files of `engines`.
std::filesystem::path engine_directory(const std::filesystem::path& bundle,
                                       const EngineSet& engines);

}  // namespace pass
