// Implements api.h with NVIDIA's headers. It is compiled once for each library whose headers are given, with
// PASS_TRT_MAKE set to the name of the function that makes it. The namespace `nvinfer1` is renamed in each, since both
// libraries have classes of the same names, whose inline functions the linker would merge.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include "backends/trt/api.h"
#include "errors.h"
#include "log.h"

namespace pass {

namespace {

namespace nv = nvinfer1;

// Return values report TensorRT's errors, so that its messages about them are warnings.
class Logger : public nv::ILogger {
   public:
    void log(Severity severity, const char* message) noexcept override {
        const LogLevel level = severity <= Severity::kWARNING ? LogLevel::warning
                               : severity == Severity::kINFO  ? LogLevel::info
                                                              : LogLevel::verbose;
        if (level >= log_level()) pass::log(level, std::string("tensorrt: ") + message);
    }
};

class Context : public TrtContext {
   public:
    explicit Context(nv::IExecutionContext* context) : context_(context) {}

    void set_scratch(std::byte* address, std::int64_t size) override { context_->setDeviceMemoryV2(address, size); }
    bool set_profile(int index, void* stream) override {
        return context_->setOptimizationProfileAsync(index, static_cast<cudaStream_t>(stream));
    }
    bool set_shape(const std::string& input, const Shape& shape) override {
        nv::Dims sizes{};
        if (shape.size() > nv::Dims::MAX_DIMS) return false;
        sizes.nbDims = static_cast<std::int32_t>(shape.size());
        for (std::size_t i = 0; i < shape.size(); ++i) sizes.d[i] = shape[i];
        return context_->setInputShape(input.c_str(), sizes);
    }
    bool set_address(const std::string& tensor, std::byte* address) override {
        return context_->setTensorAddress(tensor.c_str(), address);
    }
    bool capturable(void* stream) override { return ask_capturable(*context_, static_cast<cudaStream_t>(stream)); }
    bool enqueue(void* stream) override { return context_->enqueueV3(static_cast<cudaStream_t>(stream)); }

   private:
    // A template, so that it compiles with headers that lack the function.
    template <class Asked>
    static bool ask_capturable(Asked& context, cudaStream_t stream) {
        if constexpr (requires { context.isStreamCapturable(stream); }) return context.isStreamCapturable(stream);
        return true;
    }

    std::unique_ptr<nv::IExecutionContext> context_;
};

class Plan : public TrtPlan {
   public:
    explicit Plan(nv::ICudaEngine* engine) : engine_(engine) {}

    std::int64_t scratch_size() const override { return engine_->getDeviceMemorySizeV2(); }
    int profiles() const override { return engine_->getNbOptimizationProfiles(); }
    std::optional<std::map<std::string, std::string>> aliases() const override { return ask_aliases(*engine_); }
    std::unique_ptr<TrtContext> create_context() override {
        auto* context = engine_->createExecutionContext(nv::ExecutionContextAllocationStrategy::kUSER_MANAGED);
        return context == nullptr ? nullptr : std::make_unique<Context>(context);
    }

   private:
    template <class Asked>
    static std::optional<std::map<std::string, std::string>> ask_aliases(Asked& engine) {
        std::optional<std::map<std::string, std::string>> found;
        if constexpr (requires { engine.getAliasedInputTensor(""); }) {
            found.emplace();
            for (int i = 0; i < engine.getNbIOTensors(); ++i) {
                const char* name = engine.getIOTensorName(i);
                if (engine.getTensorIOMode(name) != nv::TensorIOMode::kOUTPUT) continue;
                if (const char* source = engine.getAliasedInputTensor(name)) found->emplace(name, source);
            }
        }
        return found;
    }

    std::unique_ptr<nv::ICudaEngine> engine_;
};

class Api : public TrtApi {
   public:
    explicit Api(void* handle) : handle_(handle) {
        const auto create =
            reinterpret_cast<void* (*)(void*, std::int32_t)>(dlsym(handle, "createInferRuntime_INTERNAL"));
        if (create != nullptr) runtime_.reset(static_cast<nv::IRuntime*>(create(&logger_, NV_TENSORRT_VERSION)));
        if (runtime_ == nullptr) {
            throw Error("TensorRT " + Api::version() + " does not start with the headers of " +
                        std::to_string(NV_TENSORRT_MAJOR) + "." + std::to_string(NV_TENSORRT_MINOR) +
                        ": is the GPU visible to nvidia-smi? Else build libpass with its headers");
        }
    }

    std::string version() const override {
        std::string found;
        for (const char* part : {"Major", "Minor", "Patch", "Build"}) {
            const std::string name = "getInferLib" + std::string(part) + "Version";
            const auto ask = reinterpret_cast<std::int32_t (*)()>(dlsym(handle_, name.c_str()));
            if (ask != nullptr) found += (found.empty() ? "" : ".") + std::to_string(ask());
        }
        return found;
    }
    std::unique_ptr<TrtPlan> deserialize(std::span<const std::byte> engine) override {
        auto* found = runtime_->deserializeCudaEngine(engine.data(), engine.size());
        return found == nullptr ? nullptr : std::make_unique<Plan>(found);
    }

   private:
    void* handle_;
    Logger logger_;
    std::unique_ptr<nv::IRuntime> runtime_;
};

}  // namespace

std::unique_ptr<TrtApi> PASS_TRT_MAKE(void* handle) { return std::make_unique<Api>(handle); }

}  // namespace pass
