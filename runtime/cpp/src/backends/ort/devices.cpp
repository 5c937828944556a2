#include "backends/ort/devices.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
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
        {"cpu", "CPUExecutionProvider", "Cpu", false, {{}}, 0},
        {"cuda",
         cuda_provider,
         "Cuda",
         false,
         {{{capture_option, "1"}, {"use_tf32", "0"}}, {{"use_tf32", "0"}}},
         0},
        {"tensorrt-rtx-ep",
         "NvTensorRTRTXExecutionProvider",
         "Cuda",
         true,
         {{{capture_option, "1"}}, {}},
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

#if ORT_API_VERSION >= 22

std::string plugin_path(const LoadOptions& options) {
    if (!options.plugin.empty()) return options.plugin.string();
    const char* named = std::getenv("PASS_TENSORRT_RTX_PLUGIN");
    return named == nullptr ? "" : named;
}

// Makes sessions run on the plugin's provider. Throws Error if the plugin finds no such GPU.
void append_plugin(const OrtLibrary& library, OrtSessionOptions* session_options,
                   const Device& device, const std::vector<const char*>& keys,
                   const std::vector<const char*>& values) {
    const OrtApi& api = library.api();
    const OrtEpDevice* const* devices_found = nullptr;
    std::size_t count = 0;
    library.check(api.GetEpDevices(library.environment(), &devices_found, &count),
                  "onnxruntime cannot list devices");
    for (std::size_t i = 0, gpu = 0; i < count; ++i) {
        if (std::strcmp(api.EpDevice_EpName(devices_found[i]), device.provider) != 0) continue;
        if (gpu++ != static_cast<std::size_t>(device.ordinal)) continue;  // GPUs come in order
        library.check(api.SessionOptionsAppendExecutionProvider_V2(
                          session_options, library.environment(), &devices_found[i], 1, keys.data(),
                          values.data(), keys.size()),
                      "onnxruntime cannot use " + std::string(device.provider));
        return;
    }
    throw Error("the plugin found no GPU " + std::to_string(device.ordinal) + " for " +
                device.provider + " (is it visible to nvidia-smi?); use --device cpu");
}

#endif

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
        if (!device.plugin && !has_provider(library, device.provider)) {
            throw Error("this onnxruntime has no " + std::string(device.provider) +
                        ": set PASS_ONNXRUNTIME to the libonnxruntime.so of onnxruntime-gpu, or "
                        "use --device cpu");
        }
        return device;
    }
    throw Error("ONNX Runtime does not run device " + chosen +
                "; use cpu, cuda or tensorrt-rtx-ep");
}

void register_plugin([[maybe_unused]] const OrtLibrary& library, const Device& device,
                     [[maybe_unused]] const LoadOptions& options) {
    if (!device.plugin) return;
#if ORT_API_VERSION < 22
    throw Error(
        "this libpass was built with headers of ONNX Runtime before 1.22, which have no plugins; "
        "use --device cpu");
#else
    const std::string path = plugin_path(options);
    if (path.empty()) {
        throw Error("device " + std::string(device.name) +
                    " needs ONNX Runtime's plugin for it: set PASS_TENSORRT_RTX_PLUGIN to its "
                    "library, or use --device cpu");
    }
    // The plugin does not find the libraries that it needs by itself, so they are opened before it.
    for (const std::filesystem::path& needed : options.plugin_libraries) {
        if (dlopen(needed.c_str(), RTLD_NOW | RTLD_GLOBAL | RTLD_NODELETE) == nullptr)
            throw Error("the plugin's library cannot be opened: " + std::string(dlerror()));
    }
    OrtStatus* status = library.api().RegisterExecutionProviderLibrary(library.environment(),
                                                                       path.c_str(), path.c_str());
    // A process can register a plugin only once, and another session may have done so.
    if (status != nullptr &&
        std::strstr(library.api().GetErrorMessage(status), "already") != nullptr) {
        library.api().ReleaseStatus(status);
        return;
    }
    library.check(status, "onnxruntime cannot register the plugin " + path);
#endif
}

void append_provider(const OrtLibrary& library, OrtSessionOptions* session_options,
                     const Device& device, const ProviderOptions& provider_options) {
    const OrtApi& api = library.api();
    std::vector<const char*> keys, values;
    for (const auto& [key, value] : provider_options) {
        keys.push_back(key);
        values.push_back(value);
    }
    const std::string ordinal = std::to_string(device.ordinal);
    if (device.plugin) {
#if ORT_API_VERSION >= 22  // With older headers, `register_plugin` refuses plugins.
        append_plugin(library, session_options, device, keys, values);
#endif
    } else if (std::strcmp(device.name, "cuda") == 0) {
        keys.push_back("device_id");
        values.push_back(ordinal.c_str());
        const auto cuda =
            library.make(api.CreateCUDAProviderOptions, api.ReleaseCUDAProviderOptions);
        library.check(
            api.UpdateCUDAProviderOptions(cuda.get(), keys.data(), values.data(), keys.size()),
            "onnxruntime cannot use CUDA");
        library.check(
            api.SessionOptionsAppendExecutionProvider_CUDA_V2(session_options, cuda.get()),
            "onnxruntime could not start CUDAExecutionProvider (is the GPU visible?); use --device "
            "cpu");
    }
}

std::unique_ptr<Memory> open_memory(const Device& device, std::shared_ptr<Allocator> allocator) {
    if (device.on_cpu()) return std::make_unique<HostMemory>(std::move(allocator));
    return std::make_unique<Cuda>(CudaApi::open(), device.ordinal);
}

}  // namespace pass
