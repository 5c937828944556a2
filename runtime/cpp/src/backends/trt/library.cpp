#include "backends/trt/library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "errors.h"

namespace pass {

// Each is nvinfer.cpp, compiled with the headers of its library.
#ifdef PASS_TENSORRT
std::unique_ptr<TrtApi> make_tensorrt(void* handle);
#else
constexpr std::unique_ptr<TrtApi> (*make_tensorrt)(void*) = nullptr;
#endif
#ifdef PASS_TENSORRT_RTX
std::unique_ptr<TrtApi> make_tensorrt_rtx(void* handle);
#else
constexpr std::unique_ptr<TrtApi> (*make_tensorrt_rtx)(void*) = nullptr;
#endif

const std::vector<TrtLibrary>& trt_libraries() {
    static const std::vector<TrtLibrary> known{
        {"tensorrt", "libnvinfer.so.10", "PASS_TENSORRT", 10, 15, "PASS_TENSORRT_INCLUDE", make_tensorrt},
        {"tensorrt-rtx", "libtensorrt_rtx.so.1", "PASS_TENSORRT_RTX", 1, 5, "PASS_TENSORRT_RTX_INCLUDE",
         make_tensorrt_rtx},
    };
    return known;
}

const TrtLibrary* find_trt_library(const std::string& name) {
    for (const TrtLibrary& library : trt_libraries()) {
        if (library.name == name) return &library;
    }
    return nullptr;
}

std::unique_ptr<TrtApi> open_trt(const TrtLibrary& library, const std::filesystem::path& path) {
    const std::string name = library.name, variable = library.variable;
    if (library.make == nullptr) {
        throw Error("this libpass was built without the headers of " + name + ": build it with -D" + library.headers +
                    "=DIRECTORY, or use --device cpu");
    }
    const char* named = std::getenv(library.variable);
    const std::string file = !path.empty() ? path.string() : named != nullptr && *named != '\0' ? named : library.file;
    void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle == nullptr) {
        throw Error(name + " cannot be opened (" + dlerror() + "); set " + variable + " to its library, as " +
                    library.file);
    }
    const auto number = [&](const char* part) {
        const auto ask = reinterpret_cast<int (*)()>(dlsym(handle, part));
        if (ask == nullptr) throw Error(file + " is not " + name + "; set " + variable + " to " + library.file);
        return ask();
    };
    const int major = number("getInferLibMajorVersion"), minor = number("getInferLibMinorVersion");
    if (major < library.major || (major == library.major && minor < library.minor)) {
        throw Error(name + " " + std::to_string(major) + "." + std::to_string(minor) + " is older than " +
                    std::to_string(library.major) + "." + std::to_string(library.minor) +
                    ", the first with a KV cache layer; install a newer one");
    }
    return library.make(handle);
}

}  // namespace pass
