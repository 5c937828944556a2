// TensorRT and TensorRT-RTX; they differ in the fields of TrtLibrary alone.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backends/trt/api.h"
#include "pass/options.hpp"

namespace pass {

// file: the library to open where the environment has no `variable`. major, minor: the oldest version with a KV cache
// update layer. headers: the CMake variable for its headers. make: null where libpass was built without them.
struct TrtLibrary {
    const char* name;
    const char* file;
    const char* variable;
    int major, minor;
    const char* headers;
    std::unique_ptr<TrtApi> (*make)(void* handle);
};

const std::vector<TrtLibrary>& trt_libraries();
// Null where there is no library of this name.
const TrtLibrary* find_trt_library(const std::string& name);

// Opens `library`. path: empty is the one in the environment, then the loader's own search. Throws Error where it was
// not compiled in, cannot be opened, or is too old.
std::unique_ptr<TrtApi> open_trt(const TrtLibrary& library, const std::filesystem::path& path);

}  // namespace pass
