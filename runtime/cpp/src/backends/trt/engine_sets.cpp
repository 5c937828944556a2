#include <algorithm>

#include "backends/trt/library.h"
#include "bundle/hashes.h"
#include "errors.h"

namespace pass {

namespace {

std::string listed(const std::vector<std::string>& targets) {
    std::string text;
    for (const std::string& target : targets) text += (text.empty() ? "" : ", ") + target;
    return text;
}

std::string how_to_build(const std::filesystem::path& bundle, const std::string& library) {
    return "; run: pass-export build " + bundle.string() + " --engine " + library;
}

// Throws Error where an engine of the set is missing, or is not the file that was built.
void verify_engines(const std::filesystem::path& bundle, const EngineSet& engines, bool hashes) {
    const std::filesystem::path directory = engine_directory(bundle, engines);
    const std::string build = how_to_build(bundle, engines.library);
    Remembered remembered;
    for (const EngineFile& engine : engines.engines) {
        const std::string path = (directory / engine.file).string();
        std::error_code error;
        if (!std::filesystem::is_regular_file(path, error)) throw Error(path + " is missing" + build);
        const auto size = std::filesystem::file_size(path);
        if (size == static_cast<std::uintmax_t>(engine.bytes) && (!hashes || remembered.matches(path, engine.sha256))) {
            continue;
        }
        throw Error(path + " is not the file that was built (" + std::to_string(size) + " bytes, " +
                    std::to_string(engine.bytes) + " listed)" + build + " --force");
    }
    remembered.save();
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
        return "are for " + listed(engines.targets) + ", and this GPU (" + gpu.name + ") is " + gpu.target;
    }
    return "";
}

const EngineSet& choose_engines(const std::filesystem::path& bundle, const Manifest& manifest,
                                const std::string& library, const std::string& version, const std::optional<Gpu>& gpu,
                                bool verify, const std::string& absent) {
    const std::string place = bundle.string();
    const std::string build = how_to_build(bundle, library);
    const EngineSet *newest = nullptr, *fitting = nullptr;
    for (const EngineSet& engines : manifest.engines) {
        if (engines.library != library) continue;
        newest = &engines;
        if (gpu && why_not(engines, manifest, version, *gpu).empty()) fitting = &engines;
    }
    if (newest == nullptr) throw Error(place + " has no " + library + " engines" + build);
    if (!gpu) throw Error(library + " needs an NVIDIA GPU, and none is visible (" + absent + "); use --device cpu");
    if (fitting == nullptr) {
        throw Error("the " + library + " engines in " + place + " " + why_not(*newest, manifest, version, *gpu) +
                    build);
    }
    verify_engines(bundle, *fitting, verify);
    return *fitting;
}

}  // namespace pass
