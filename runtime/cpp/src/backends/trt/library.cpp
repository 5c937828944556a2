#include "backends/trt/library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>

#include "backends/capabilities.h"
#include "bundle/integrity.h"
#include "errors.h"

namespace pass {

// nvinfer.cpp defines each of them, compiled with the headers of its library.
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

namespace {

std::string how_to_build(const std::filesystem::path& bundle, const std::string& library) {
    return "; run: pass-export build " + bundle.string() + " --engine " + library;
}

// Throws Error if an engine is missing, or is not the file that was built. hashes: compare them, not only sizes.
void verify_engines(const std::filesystem::path& bundle, const EngineSet& engines, bool hashes) {
    const std::filesystem::path directory = engine_directory(bundle, engines);
    const std::string build = how_to_build(bundle, engines.library);
    HashCache cache;
    for (const EngineFile& engine : engines.engines) {
        const std::string path = (directory / engine.file).string();
        std::error_code error;
        if (!std::filesystem::is_regular_file(path, error)) throw Error(path + " is missing" + build);
        const auto size = std::filesystem::file_size(path);
        if (size == static_cast<std::uintmax_t>(engine.bytes) && (!hashes || cache.matches(path, engine.sha256))) {
            continue;
        }
        throw Error(path + " is not the file that was built (" + std::to_string(size) + " bytes, " +
                    std::to_string(engine.bytes) + " listed)" + build + " --force");
    }
    cache.save();
}

}  // namespace

std::filesystem::path engine_directory(const std::filesystem::path& bundle, const EngineSet& engines) {
    return bundle / "engines" / engines.directory;
}

std::string why_not(const EngineSet& engines, const Manifest& manifest, const std::string& version, const Gpu& gpu) {
    if (engines.bundle != manifest.content()) return "were built from other graphs than the bundle has now";
    if (engines.version != version) {
        return "were built by version " + engines.version + ", and " + version + " is installed";
    }
    if (std::find(engines.targets.begin(), engines.targets.end(), gpu.target) == engines.targets.end()) {
        return "are for " + comma_list(engines.targets) + ", and this GPU (" + gpu.name + ") is " + gpu.target;
    }
    return "";
}

const EngineSet& choose_engines(const std::filesystem::path& bundle, const Manifest& manifest,
                                const std::string& library, const std::string& version, const std::optional<Gpu>& gpu,
                                bool verify, const std::string& why_absent) {
    const std::string place = bundle.string();
    const std::string build = how_to_build(bundle, library);
    const EngineSet *newest = nullptr, *fitting = nullptr;
    for (const EngineSet& engines : manifest.engines) {
        if (engines.library != library) continue;
        newest = &engines;
        if (gpu && why_not(engines, manifest, version, *gpu).empty()) fitting = &engines;
    }
    if (newest == nullptr) throw Error(place + " has no " + library + " engines" + build);
    if (!gpu) throw Error(library + " needs an NVIDIA GPU, and none is visible (" + why_absent + "); use --device cpu");
    if (fitting == nullptr) {
        throw Error("the " + library + " engines in " + place + " " + why_not(*newest, manifest, version, *gpu) +
                    build);
    }
    verify_engines(bundle, *fitting, verify);
    return *fitting;
}

}  // namespace pass
