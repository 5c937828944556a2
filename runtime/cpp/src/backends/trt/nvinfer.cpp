// Implements api.h with NVIDIA's headers. Compiled once for each major version whose headers are
// given: each time PASS_TRT_MAKE names the function, and the namespace `nvinfer1` gets another
// name, or the linker would merge the inline functions of all versions.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <deque>
#include <mutex>

#include "backends/trt/api.h"
#include "errors.h"
#include "log.h"
#include "utf8.h"

namespace pass {

namespace {

namespace nv = nvinfer1;

constexpr std::size_t max_kept_errors = 4;  // the last ones, for error messages

// Writes the library's messages to the log, and keeps the last errors.
class Logger : public nv::ILogger {
   public:
    void log(Severity severity, const char* message) noexcept override {
        const LogLevel level = severity <= Severity::kERROR     ? LogLevel::error
                               : severity == Severity::kWARNING ? LogLevel::warning
                               : severity == Severity::kINFO    ? LogLevel::info
                                                                : LogLevel::verbose;
        if (level == LogLevel::error) keep(message);
        if (level >= log_level()) pass::log(level, std::string("tensorrt: ") + message);
    }

    // The errors that were kept since the last call, in one line.
    std::string take() {
        const std::lock_guard lock(mutex_);
        std::string line;
        for (const std::string& error : errors_) line += (line.empty() ? "" : "; ") + error;
        errors_.clear();
        return line;
    }

   private:
    void keep(const char* message) noexcept {
        try {
            const std::lock_guard lock(mutex_);
            errors_.push_back(one_line(message));
            if (errors_.size() > max_kept_errors) errors_.pop_front();
        } catch (const std::exception&) {  // There is no memory for the message.
        }
    }

    std::mutex mutex_;
    std::deque<std::string> errors_;
};

class Context : public TrtContext {
   public:
    explicit Context(nv::IExecutionContext* context) : context_(context) {}

    void set_scratch(std::byte* address, std::int64_t size) override {
        context_->setDeviceMemoryV2(address, size);
    }
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
    bool enqueue(void* stream) override {
        return context_->enqueueV3(static_cast<cudaStream_t>(stream));
    }

   private:
    std::unique_ptr<nv::IExecutionContext> context_;
};

class CudaEngine : public TrtCudaEngine {
   public:
    explicit CudaEngine(nv::ICudaEngine* engine) : engine_(engine) {}

    std::int64_t scratch_size() const override { return engine_->getDeviceMemorySizeV2(); }
    std::unique_ptr<TrtContext> create_context() override {
        auto* context =
            engine_->createExecutionContext(nv::ExecutionContextAllocationStrategy::kUSER_MANAGED);
        return context == nullptr ? nullptr : std::make_unique<Context>(context);
    }

   private:
    std::unique_ptr<nv::ICudaEngine> engine_;
};

class Api : public TrtApi {
   public:
    explicit Api(void* handle) : handle_(handle) {
        // The headers' createInferRuntime calls this function, but only of a linked library.
        const auto create = reinterpret_cast<void* (*)(void*, std::int32_t)>(
            dlsym(handle, "createInferRuntime_INTERNAL"));
        if (create != nullptr)
            runtime_.reset(static_cast<nv::IRuntime*>(create(&logger_, NV_TENSORRT_VERSION)));
        if (runtime_ == nullptr) {
            throw Error("TensorRT " + Api::version() + " does not start with the headers of " +
                        std::to_string(NV_TENSORRT_MAJOR) + "." +
                        std::to_string(NV_TENSORRT_MINOR) +
                        ": is the GPU visible to nvidia-smi? Else build libpass with its headers");
        }
    }

    std::string version() const override {
        std::string result;
        for (const char* part : {"Major", "Minor", "Patch", "Build"}) {
            const std::string name = "getInferLib" + std::string(part) + "Version";
            const auto get = reinterpret_cast<std::int32_t (*)()>(dlsym(handle_, name.c_str()));
            if (get != nullptr) result += (result.empty() ? "" : ".") + std::to_string(get());
        }
        return result;
    }
    std::unique_ptr<TrtCudaEngine> deserialize(std::span<const std::byte> content) override {
        auto* engine = runtime_->deserializeCudaEngine(content.data(), content.size());
        return engine == nullptr ? nullptr : std::make_unique<CudaEngine>(engine);
    }
    std::string take_errors() override { return logger_.take(); }

   private:
    void* handle_;
    Logger logger_;
    std::unique_ptr<nv::IRuntime> runtime_;
};

}  // namespace

std::unique_ptr<TrtApi> PASS_TRT_MAKE(void* handle) { return std::make_unique<Api>(handle); }

}  // namespace pass
