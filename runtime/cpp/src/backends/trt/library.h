// TensorRT and TensorRT-RTX, which differ in the fields of TrtLibrary alone, and the engine set of a bundle that fits
// this machine, chosen from the manifest alone.
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

// file: the library to open if the environment has no `variable`. major, minor: the oldest version with a KV cache
// update layer. headers: the CMake variable for its headers. make: null if libpass was built without them.
struct TrtLibrary {
    const char* name;
    const char* file;
    const char* variable;
    int major, minor;
    const char* headers;
    std::unique_ptr<TrtApi> (*make)(void* handle);
};

const std::vector<TrtLibrary>& trt_libraries();
// Null if there is no library of this name.
const TrtLibrary* find_trt_library(const std::string& name);

// Opens `library`. path: empty is the one in the environment, then the loader's own search. Throws Error if it was
// not compiled in, cannot be opened, or is too old.
std::unique_ptr<TrtApi> open_trt(const TrtLibrary& library, const std::filesystem::path& path);

// The newest engine set of `library` for this `version` and GPU. Throws Error with the reason if none fits. verify:
// compare the hashes of its files. absent: why there is no `gpu`, for the message.
const EngineSet& choose_engines(const std::filesystem::path& bundle, const Manifest& manifest,
                                const std::string& library, const std::string& version, const std::optional<Gpu>& gpu,
                                bool verify, const std::string& absent);

// The reason why `engines` cannot run here; empty if they can.
std::string why_not(const EngineSet& engines, const Manifest& manifest, const std::string& version, const Gpu& gpu);

// The directory with the files of `engines`.
std::filesystem::path engine_directory(const std::filesystem::path& bundle, const EngineSet& engines);

}  // namespace pass
