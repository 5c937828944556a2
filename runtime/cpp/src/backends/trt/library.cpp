#include "backends/trt/library.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <vector>

#include "backends/capabilities.h"
#include "bundle/integrity.h"
#include "errors.h"

namespace pass {

// nvinfer.cpp, compiled once for each version whose headers are given, defines these functions.
#ifdef PASS_TENSORRT_11
std::unique_ptr<TrtApi> make_tensorrt_11(void* handle);
#else
constexpr std::unique_ptr<TrtApi> (*make_tensorrt_11)(void*) = nullptr;
#endif
#ifdef PASS_TENSORRT_10
std::unique_ptr<TrtApi> make_tensorrt_10(void* handle);
#else
constexpr std::unique_ptr<TrtApi> (*make_tensorrt_10)(void*) = nullptr;
#endif

namespace {

// A major version. make: null if libpass was built without its headers.
struct Version {
    int major;
    const char* file;
    std::unique_ptr<TrtApi> (*make)(void* handle);
};

constexpr std::array<Version, 2> versions{
    {{11, "libnvinfer.so.11", make_tensorrt_11}, {10, "libnvinfer.so.10", make_tensorrt_10}}};
constexpr int min_minor = 15;  // of version 10: the first with a KV cache layer

Error without_headers(const std::string& version) {
    return Error("this libpass was built without the headers of " + version +
                 ": build it with -DPASS_TENSORRT_INCLUDE=DIRECTORY, or use --device cpu");
}

// The files to try to open.
std::vector<std::string> files_of(const std::filesystem::path& path) {
    if (!path.empty()) return {path.string()};
    const char* named = std::getenv("PASS_TENSORRT");
    if (named != nullptr && *named != '\0') return {named};
    std::vector<std::string> files;
    for (const Version& version : versions) {
        if (version.make != nullptr) files.emplace_back(version.file);
    }
    return files;
}

}  // namespace

std::unique_ptr<TrtApi> open_tensorrt(const std::filesystem::path& path) {
    // Messages name the file of the newest version whose headers libpass was built with.
    const auto newest_built = std::find_if(
        versions.begin(), versions.end(), [](const Version& each) { return each.make != nullptr; });
    if (newest_built == versions.end()) throw without_headers(tensorrt);
    const std::string name = tensorrt, newest_file = newest_built->file;
    const std::string set_path = "; set PASS_TENSORRT to ";
    std::string file, failures;
    void* handle = nullptr;
    for (const std::string& tried : files_of(path)) {
        file = tried;
        handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
        if (handle != nullptr) break;
        failures += (failures.empty() ? "" : "; ") + std::string(dlerror());
    }
    if (handle == nullptr) {
        throw Error(name + " cannot be opened (" + failures + ")" + set_path + "its library, as " +
                    newest_file);
    }
    const auto number_of = [&](const char* function) {
        const auto get = reinterpret_cast<int (*)()>(dlsym(handle, function));
        if (get == nullptr) throw Error(file + " is not " + name + set_path + newest_file);
        return get();
    };
    const int major = number_of("getInferLibMajorVersion"),
              minor = number_of("getInferLibMinorVersion");
    const int newest = versions.front().major, oldest = versions.back().major;
    if (major < oldest || (major == oldest && minor < min_minor) || major > newest) {
        throw Error(file + " is version " + std::to_string(major) + "." + std::to_string(minor) +
                    ", and " + name + " is run from " + std::to_string(oldest) + "." +
                    std::to_string(min_minor) + " (the first with a KV cache layer) to " +
                    std::to_string(newest) + set_path + newest_file);
    }
    const auto version = std::find_if(versions.begin(), versions.end(),
                                      [&](const Version& each) { return each.major == major; });
    if (version == versions.end() || version->make == nullptr)
        throw without_headers(name + " " + std::to_string(major));
    return version->make(handle);
}

namespace {

std::string how_to_build(const std::filesystem::path& bundle) {
    return "; run: pass-export build " + bundle.string() + " --engine " + tensorrt;
}

// hashes: false compares sizes alone.
void verify_engines(const std::filesystem::path& bundle, const EngineSet& engines, bool hashes) {
    const std::filesystem::path directory = engine_directory(bundle, engines);
    const std::string build = how_to_build(bundle);
    HashCache cache;
    for (const EngineFile& engine : engines.engines) {
        const std::string path = (directory / engine.file).string();
        std::error_code error;
        if (!std::filesystem::is_regular_file(path, error))
            throw Error(path + " is missing" + build);
        const auto size = std::filesystem::file_size(path);
        if (size == static_cast<std::uintmax_t>(engine.info.bytes) &&
            (!hashes || cache.matches(path, engine.info.sha256))) {
            continue;
        }
        throw Error(path + " is not the file that was built (" + std::to_string(size) + " bytes, " +
                    std::to_string(engine.info.bytes) + " listed)" + build + " --force");
    }
    cache.save();
}

}  // namespace

std::filesystem::path engine_directory(const std::filesystem::path& bundle,
                                       const EngineSet& engines) {
    return bundle / "engines" / engines.directory;
}

std::string why_not(const EngineSet& engines, const Manifest& manifest, const std::string& version,
                    const Gpu& gpu) {
    if (engines.bundle != manifest.content_hash())
        return "were built from other graphs than the bundle has now";
    if (engines.version != version)
        return "were built by version " + engines.version + ", and " + version + " is installed";
    if (std::find(engines.targets.begin(), engines.targets.end(), gpu.target) ==
        engines.targets.end()) {
        return "are for " + comma_list(engines.targets) + ", and this GPU (" + gpu.name + ") is " +
               gpu.target;
    }
    return "";
}

const EngineSet& choose_engines(const std::filesystem::path& bundle, const Manifest& manifest,
                                const std::string& version, const std::optional<Gpu>& gpu,
                                bool verify, const std::string& why_absent) {
    const std::string library = tensorrt;
    const std::string build = how_to_build(bundle);
    const EngineSet *newest = nullptr, *fitting = nullptr;
    for (const EngineSet& engines : manifest.engines) {
        if (engines.library != library) continue;
        newest = &engines;
        if (gpu && why_not(engines, manifest, version, *gpu).empty()) fitting = &engines;
    }
    if (newest == nullptr) throw Error(bundle.string() + " has no " + library + " engines" + build);
    if (!gpu)
        throw Error(library + " needs an NVIDIA GPU, and none is visible (" + why_absent +
                    "); use --device cpu");
    if (fitting == nullptr) {
        throw Error("the " + library + " engines in " + bundle.string() + " " +
                    why_not(*newest, manifest, version, *gpu) + build);
    }
    verify_engines(bundle, *fitting, verify);
    return *fitting;
}

}  // namespace pass
