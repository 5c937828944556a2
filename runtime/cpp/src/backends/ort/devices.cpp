#include "backends/ort/devices.h"

#include <algorithm>
#include <array>
#include <vector>

#include "backends/capabilities.h"
#include "backends/cuda.h"
#include "errors.h"
#include "log.h"

namespace pass {

namespace {

bool has_cuda(const OrtLibrary& library) {
    const std::vector<std::string> names = library.providers();
    return std::find(names.begin(), names.end(), "CUDAExecutionProvider") != names.end();
}

// Whether there is a CUDA library that sees a GPU. If not, the log says why.
bool sees_gpu() {
    try {
        const CudaApi api = CudaApi::open();
        if (find_gpu(api, 0)) return true;
        log(LogLevel::info, "device auto: CUDA is not used: " + why_no_gpu(api));
    } catch (const Error& error) {
        log(LogLevel::info, "device auto: CUDA is not used: " + std::string(error.what()));
    }
    return false;
}

}  // namespace

Device choose_device(const OrtLibrary& library, const std::string& name) {
    const auto [kind, ordinal] = split_device(name);
    if (kind == "cpu" || (kind == "auto" && !(has_cuda(library) && sees_gpu()))) return {};
    if (!has_cuda(library)) {
        throw Error(
            "this onnxruntime has no CUDAExecutionProvider: set PASS_ONNXRUNTIME to the "
            "libonnxruntime.so of onnxruntime-gpu, or use --device cpu");
    }
    return {true, ordinal};
}

void add_cuda(const OrtLibrary& library, OrtSessionOptions* session_options, int ordinal,
              bool capture) {
    const OrtApi& api = library.api();
    const std::string number = std::to_string(ordinal);
    // TF32 is off, because it rounds float32.
    const std::array<const char*, 3> keys{"device_id", "use_tf32", "enable_cuda_graph"};
    const std::array<const char*, 3> values{number.c_str(), "0", capture ? "1" : "0"};
    const auto cuda = library.make(api.CreateCUDAProviderOptions, api.ReleaseCUDAProviderOptions);
    library.check(
        api.UpdateCUDAProviderOptions(cuda.get(), keys.data(), values.data(), keys.size()),
        "onnxruntime cannot use CUDA");
    library.check(api.SessionOptionsAppendExecutionProvider_CUDA_V2(session_options, cuda.get()),
                  "onnxruntime could not start CUDAExecutionProvider (is the GPU visible?); use "
                  "--device cpu");
}

}  // namespace pass
