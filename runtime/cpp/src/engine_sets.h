// Which of a bundle's engine sets fits this machine: decided from the manifest, before anything is allocated.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "cuda_api.h"
#include "manifest.h"

namespace pass {

// The newest set of `library` for this `version` and GPU; Error tells why none fits. verify: check hashes.
const EngineSet& choose_engines(const std::filesystem::path& bundle, const Manifest& manifest,
                                const std::string& library, const std::string& version, const std::optional<Gpu>& gpu,
                                bool verify);

// What keeps `engines` from running; empty where nothing does.
std::string why_not(const EngineSet& engines, const Manifest& manifest, const std::string& version, const Gpu& gpu);

// Where the files of `engines` are.
std::filesystem::path engine_directory(const std::filesystem::path& bundle, const EngineSet& engines);

}  // namespace pass
