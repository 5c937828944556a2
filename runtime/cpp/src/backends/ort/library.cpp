#include "backends/ort/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <sstream>

#include "errors.h"

#ifndef PASS_DEFAULT_ONNXRUNTIME
#define PASS_DEFAULT_ONNXRUNTIME ""
#endif

namespace pass {

namespace {

// The message on one line, as messages of Error are.
std::string one_line(const char* text) {
    std::istringstream words(text);
    std::string line;
    for (std::string word; words >> word;) line += (line.empty() ? "" : " ") + word;
    return line;
}

std::string library_name(const std::filesystem::path& given) {
    if (!given.empty()) return given.string();
    const char* named = std::getenv("PASS_ONNXRUNTIME");
    if (named != nullptr && *named != '\0') return named;
    const std::string built = PASS_DEFAULT_ONNXRUNTIME;
    return !built.empty() && std::filesystem::exists(built) ? built : "libonnxruntime.so.1";
}

}  // namespace

std::shared_ptr<const OrtLibrary> OrtLibrary::open(const std::filesystem::path& path) {
    const std::string name = library_name(path);
    // It is never unloaded, since it has threads and thread-local memory of its own.
    void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle == nullptr) {
        throw Error("onnxruntime cannot be opened (" + one_line(dlerror()) +
                    "); set PASS_ONNXRUNTIME to its libonnxruntime.so, of the Python package or a release");
    }
    using GetBase = const OrtApiBase* (*)();
    const auto get_base = reinterpret_cast<GetBase>(dlsym(handle, "OrtGetApiBase"));
    if (get_base == nullptr) throw Error(name + " is not ONNX Runtime; set PASS_ONNXRUNTIME to libonnxruntime.so");
    const OrtApiBase* base = get_base();
    const std::string version = base->GetVersionString();
    const OrtApi* api = base->GetApi(ORT_API_VERSION);
    if (api == nullptr) throw Error("onnxruntime " + version + " of " + name + " is too old; use 1.25 or newer");
    return std::shared_ptr<const OrtLibrary>(new OrtLibrary(api, version));
}

OrtLibrary::OrtLibrary(const OrtApi* api, std::string version)
    : api_(api), version_(std::move(version)), environment_(nullptr, api->ReleaseEnv) {
    OrtEnv* environment = nullptr;
    check(api_->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "pass", &environment), "onnxruntime cannot start");
    environment_.reset(environment);
}

std::vector<std::string> OrtLibrary::providers() const {
    char** names = nullptr;
    int count = 0;
    check(api_->GetAvailableProviders(&names, &count), "onnxruntime does not say what it has");
    std::vector<std::string> found(names, names + count);
    OrtStatus* status = api_->ReleaseAvailableProviders(names, count);
    check(status, "onnxruntime");
    return found;
}

void OrtLibrary::check(OrtStatus* status, const std::string& what) const {
    if (status == nullptr) return;
    const std::string message = one_line(api_->GetErrorMessage(status));
    api_->ReleaseStatus(status);
    throw Error(what + ": " + message);
}

}  // namespace pass
