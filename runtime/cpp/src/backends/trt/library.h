// The libraries that run engines, TensorRT and TensorRT-RTX: opens them, and chooses the engine set
// of a bundle that fits this machine.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/cuda.h"
#include "backends/trt/api.h"
#include "bundle/manifest.h"
#include "pass/options.hpp"

namespace pass {

// A major version of a library.
struct TrtVersion {
    int major;
    const char* file;  // its name, by which the loader finds it
    // Starts the opened library; null if libpass was built without the headers of this version.
    std::unique_ptr<TrtApi> (*make)(void* handle);
};

struct TrtLibrary {
    const char* name;
    const char* variable;              // the environment variable that may have its path
    const char* headers;               // the CMake variable for the directory of its headers
    std::vector<TrtVersion> versions;  // the newest first
    int min_minor;  // of the oldest major version: the first minor one with a KV cache layer
};

const std::vector<TrtLibrary>& trt_libraries();
// Null if there is no library of this name.
const TrtLibrary* find_trt_library(const std::string& name);

// Opens `library`. path: its file; empty: the one in `library.variable`, else the first that is
// found of the versions whose headers libpass was built with. Throws Error if the library cannot be
// opened, or libpass was built without the headers of its version.
std::unique_ptr<TrtApi> open_trt(const TrtLibrary& library, const std::filesystem::path& path);

// The newest engine set of `library` for `version` and `gpu`. Throws Error if none fits, or an
// engine is not the file that was built. verify: compare hashes. why_absent: why `gpu` is none.
const EngineSet& choose_engines(const std::filesystem::path& bundle, const Manifest& manifest,
                                const std::string& library, const std::string& version,
                                const std::optional<Gpu>& gpu, bool verify,
                                const std::string& why_absent);

// Why `engines` cannot run here, for a message; empty if they can.
std::string why_not(const EngineSet& engines, const Manifest& manifest, const std::string& version,
                    const Gpu& gpu);

// The directory with the files of `engines`.
std::filesystem::path engine_directory(const std::filesystem::path& bundle,
                                       const EngineSet& engines);

}  // namespace pass
