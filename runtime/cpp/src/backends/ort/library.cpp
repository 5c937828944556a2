#include "backends/ort/library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>

#include "errors.h"
#include "utf8.h"

#ifndef PASS_DEFAULT_ONNXRUNTIME
#define PASS_DEFAULT_ONNXRUNTIME ""
#endif

namespace pass {

namespace {

// ONNX Runtime and onnxruntime-genai report their use to their maker, unless this variable says 1
// when they are loaded; 0 in the environment is kept. It is set when libpass is loaded, because
// setenv may not run beside another thread's getenv, and a program then usually has one thread.
[[maybe_unused]] const bool telemetry_is_set = [] {
    constexpr const char* name = "ORT_DISABLE_TELEMETRY";
    const char* set = std::getenv(name);
    return (set != nullptr && *set != '\0') || setenv(name, "1", 1) == 0;
}();

// The path or name by which the library is opened. given: LoadOptions::onnxruntime.
std::string library_name(const std::filesystem::path& given) {
    if (!given.empty()) return given.string();
    const char* named = std::getenv("PASS_ONNXRUNTIME");
    if (named != nullptr && *named != '\0') return named;
    const std::string built = PASS_DEFAULT_ONNXRUNTIME;
    return !built.empty() && std::filesystem::exists(built) ? built : "libonnxruntime.so.1";
}

void ORT_API_CALL write_log(void*, OrtLoggingLevel severity, const char*, const char*, const char*,
                            const char* message) {
    // LogLevel has the same numbers, but no level above `error`.
    const int level = std::min<int>(severity, ORT_LOGGING_LEVEL_ERROR);
    log(static_cast<LogLevel>(level), "onnxruntime: " + one_line(message));
}

}  // namespace

OrtLoggingLevel severity_of(LogLevel level) { return static_cast<OrtLoggingLevel>(level); }

std::shared_ptr<const OrtLibrary> OrtLibrary::open(const std::filesystem::path& path) {
    const std::string name = library_name(path);
    // The library is never unloaded, because it has threads and thread-local memory.
    void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle == nullptr) {
        throw Error(
            "onnxruntime cannot be opened (" + one_line(dlerror()) +
            "); set PASS_ONNXRUNTIME to its libonnxruntime.so, of the Python package or a release");
    }
    using GetBase = const OrtApiBase* (*)();
    const auto get_base = reinterpret_cast<GetBase>(dlsym(handle, "OrtGetApiBase"));
    if (get_base == nullptr)
        throw Error(name + " is not ONNX Runtime; set PASS_ONNXRUNTIME to libonnxruntime.so");
    const OrtApiBase* base = get_base();
    const std::string version = base->GetVersionString();
    const OrtApi* api = base->GetApi(ORT_API_VERSION);
    if (api == nullptr)
        throw Error("onnxruntime " + version + " of " + name + " is too old; use 1.25 or newer");
    return std::shared_ptr<const OrtLibrary>(new OrtLibrary(api));
}

OrtLibrary::OrtLibrary(const OrtApi* api) : api_(api), environment_(nullptr, api->ReleaseEnv) {
    OrtEnv* environment = nullptr;
    check(api_->CreateEnvWithCustomLogger(write_log, nullptr, severity_of(log_level()), "pass",
                                          &environment),
          "onnxruntime cannot start");
    environment_.reset(environment);
}

std::vector<std::string> OrtLibrary::providers() const {
    char** names = nullptr;
    int count = 0;
    check(api_->GetAvailableProviders(&names, &count));
    std::vector<std::string> result(names, names + count);
    check(api_->ReleaseAvailableProviders(names, count));
    return result;
}

void OrtLibrary::check(OrtStatus* status, std::string_view what) const {
    if (status == nullptr) return;
    const std::string message = one_line(api_->GetErrorMessage(status));
    api_->ReleaseStatus(status);
    throw Error(std::string(what) + ": " + message);
}

}  // namespace pass
