// Chooses the engine set of a bundle that fits this machine, from the manifest alone.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "backends/cuda_api.h"
#include "bundle/manifest.h"

namespace pass {

// The newest engine set of `library` for this `version` and GPU. Throws Error with the reason where none fits. verify:
// compare the hashes of its files.
const EngineSet& choose_engines(const std::filesystem::path& bundle, const Manifest& manifest,
                                const std::string& library, const std::string& version, const std::optional<Gpu>& gpu,
                                bool verify);

// The reason why `engines` cannot run here; empty where they can.
std::string why_not(const EngineSet& engines, const Manifest& manifest, const std::string& version, const Gpu& gpu);

// The directory with the files of `engines`.
std::filesystem::path engine_directory(const std::filesystem::path& bundle, const EngineSet& engines);

}  // namespace pass
