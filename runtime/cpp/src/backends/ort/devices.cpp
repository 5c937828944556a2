#include "backends/ort/devices.h"

#include <algorithm>
#include <cstring>

#include "backends/capabilities.h"
#include "backends/cuda.h"
#include "errors.h"
#include "log.h"

namespace pass {

namespace {

constexpr const char* capture_option = "enable_cuda_graph";
constexpr const char* cuda_provider = "CUDAExecutionProvider";

const std::vector<Device>& devices() {
    // Options with captures fail for a graph with a node on the CPU, so there are others without.
    // TF32 is off, because it rounds float32.
    static const std::vector<Device> all{
        {"cpu", "CPUExecutionProvider", "Cpu", {{}}, 0},
        {"cuda",
         cuda_provider,
         "Cuda",
         {{{capture_option, "1"}, {"use_tf32", "0"}}, {{"use_tf32", "0"}}},
         0},
    };
    return all;
}

bool has_provider(const OrtLibrary& library, const char* provider) {
    const std::vector<std::string> names = library.providers();
    return std::find(names.begin(), names.end(), provider) != names.end();
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

bool Device::captures(std::size_t index) const {
    const ProviderOptions& provider_options = options.at(index);
    return std::any_of(provider_options.begin(), provider_options.end(), [](const auto& option) {
        return std::string_view(option.first) == capture_option;
    });
}

Device choose_device(const OrtLibrary& library, const std::string& name) {
    const auto [kind, ordinal] = split_device(name);
    std::string chosen = kind;
    if (kind == "auto")
        chosen = has_provider(library, cuda_provider) && sees_gpu() ? "cuda" : "cpu";
    for (Device device : devices()) {
        if (chosen != device.name) continue;
        device.ordinal = ordinal;
        if (!has_provider(library, device.provider)) {
            throw Error("this onnxruntime has no " + std::string(device.provider) +
                        ": set PASS_ONNXRUNTIME to the libonnxruntime.so of onnxruntime-gpu, or "
                        "use --device cpu");
        }
        return device;
    }
    throw Error("ONNX Runtime does not run device " + chosen + "; use cpu or cuda");
}

void append_provider(const OrtLibrary& library, OrtSessionOptions* session_options,
                     const Device& device, const ProviderOptions& provider_options) {
    if (device.on_cpu()) return;
    const OrtApi& api = library.api();
    std::vector<const char*> keys, values;
    for (const auto& [key, value] : provider_options) {
        keys.push_back(key);
        values.push_back(value);
    }
    const std::string ordinal = std::to_string(device.ordinal);
    keys.push_back("device_id");
    values.push_back(ordinal.c_str());
    const auto cuda = library.make(api.CreateCUDAProviderOptions, api.ReleaseCUDAProviderOptions);
    library.check(
        api.UpdateCUDAProviderOptions(cuda.get(), keys.data(), values.data(), keys.size()),
        "onnxruntime cannot use CUDA");
    library.check(api.SessionOptionsAppendExecutionProvider_CUDA_V2(session_options, cuda.get()),
                  "onnxruntime could not start CUDAExecutionProvider (is the GPU visible?); use "
                  "--device cpu");
}

std::unique_ptr<Memory> open_memory(const Device& device, std::shared_ptr<Allocator> allocator) {
    if (device.on_cpu()) return std::make_unique<HostMemory>(std::move(allocator));
    return std::make_unique<Cuda>(CudaApi::open(), device.ordinal);
}

}  // namespace pass
