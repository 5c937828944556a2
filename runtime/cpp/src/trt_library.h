// TensorRT and TensorRT-RTX: every difference between them is a field here.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "pass/options.hpp"
#include "trt_api.h"

namespace pass {

// file: what is opened where `variable` is not in the environment. major, minor: the oldest version with a KV cache
// update layer. headers: what the build is told to compile it with. make: null where it was not.
struct TrtLibrary {
    const char* name;
    const char* file;
    const char* variable;
    int major, minor;
    const char* headers;
    std::unique_ptr<TrtApi> (*make)(void* handle);
};

const std::vector<TrtLibrary>& trt_libraries();
// Null where `name` is none.
const TrtLibrary* find_trt_library(const std::string& name);

// path: empty is the environment's, then the loader's own search. Throws Error where it is not compiled in, cannot be
// opened, or is too old.
std::unique_ptr<TrtApi> open_trt(const TrtLibrary& library, const std::filesystem::path& path);

}  // namespace pass
