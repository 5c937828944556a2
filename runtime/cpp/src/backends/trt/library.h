// Opens TensorRT or TensorRT-RTX, and chooses the engine set of a bundle that fits this machine.
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

// A major version of a library. file: its name, for the loader. make: opens a runtime; null if
// libpass was built without the headers of this version.
struct TrtVersion {
    int major;
    const char* file;
    std::unique_ptr<TrtApi> (*make)(void* handle);
};

// variable: the environment variable with the library's path. headers: the CMake variable for its
// headers. versions: the newest first. minor: the least minor version of the oldest, the first with
// a KV cache update layer.
struct TrtLibrary {
    const char* name;
    const char* variable;
    const char* headers;
    std::vector<TrtVersion> versions;
    int minor;
};

const std::vector<TrtLibrary>& trt_libraries();
// Null if there is no library of this name.
const TrtLibrary* find_trt_library(const std::string& name);

// Opens `library`. path: its file; empty: the one in `library.variable`, then those of the versions
// whose headers libpass was built with. Throws Error if libpass was built without its headers, or
// it cannot be opened or has another version.
std::unique_ptr<TrtApi> open_trt(const TrtLibrary& library, const std::filesystem::path& path);

// The newest engine set of `library` for `version` and `gpu`. Throws Error if none fits, or an
// engine is not the file that was built. verify: compare hashes. why_absent: why there is no `gpu`.
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
