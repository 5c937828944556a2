// Implements api.h with NVIDIA's headers. This file is compiled once for each library whose headers
// are given, and defines the function that PASS_TRT_MAKE names. Each time the build gives the
// namespace `nvinfer1` another name, because the linker would merge the inline functions of classes
// that have the same name in all libraries.
#include <NvInferRuntime.h>
#include <dlfcn.h>
#include <unistd.h>

#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <system_error>
#include <vector>

#include "backends/trt/api.h"
#include "errors.h"
#include "log.h"
#include "utf8.h"

namespace pass {

namespace {

namespace nv = nvinfer1;

constexpr std::size_t max_kept_errors = 4;  // the last ones, for error messages

// Receives the library's messages: writes them to the log, and keeps the last errors.
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

#ifdef TRT_MAJOR_RTX
// A cache of compiled kernels. By default TensorRT-RTX compiles a kernel in the background, and
// runs a slower one until then, which a captured graph would keep. Contexts made with `config`
// compile before they run. If the file cannot be read or written, kernels are only compiled again.
class KernelCache {
   public:
    void use(const std::filesystem::path& file) { file_ = file; }

    std::unique_ptr<nv::IRuntimeConfig> config(nv::ICudaEngine& engine) {
        std::unique_ptr<nv::IRuntimeConfig> result(engine.createRuntimeConfig());
        if (result == nullptr) return nullptr;
        result->setExecutionContextAllocationStrategy(
            nv::ExecutionContextAllocationStrategy::kUSER_MANAGED);
        result->setDynamicShapesKernelSpecializationStrategy(
            nv::DynamicShapesKernelSpecializationStrategy::kEAGER);
        if (cache_ == nullptr) load(*result);
        if (cache_ == nullptr || !result->setRuntimeCache(*cache_)) {
            pass::log(
                LogLevel::warning,
                "the library refuses a cache of kernels, so every process compiles them again");
        }
        return result;
    }

    void save() {
        const std::unique_ptr<nv::IHostMemory> content(cache_ == nullptr ? nullptr
                                                                         : cache_->serialize());
        if (content == nullptr || file_.empty()) return;
        const char* first = static_cast<const char*>(content->data());
        const std::vector<char> bytes(first, first + content->size());
        if (bytes == saved_) return;
        // The file is renamed once complete, because other processes may read it.
        const std::filesystem::path part = file_.string() + ".part-" + std::to_string(getpid());
        std::ofstream(part, std::ios::binary)
            .write(first, static_cast<std::streamsize>(bytes.size()));
        std::error_code failed;
        if (std::filesystem::file_size(part, failed) == bytes.size() && !failed) {
            std::filesystem::rename(part, file_, failed);
        } else if (!failed) {
            failed = std::make_error_code(std::errc::no_space_on_device);
        }
        std::error_code ignored;
        std::filesystem::remove(part, ignored);
        if (failed) pass::log(LogLevel::info, "compiled kernels are not kept: " + failed.message());
        if (!failed) saved_ = bytes;
    }

   private:
    void load(nv::IRuntimeConfig& config) {
        cache_.reset(config.createRuntimeCache());
        std::ifstream file(file_, std::ios::binary);
        saved_.assign(std::istreambuf_iterator<char>(file), {});
        // The library refuses a cache of another GPU, driver or version. `save` then replaces it.
        if (cache_ == nullptr || saved_.empty() ||
            !cache_->deserialize(saved_.data(), saved_.size()))
            saved_.clear();
    }

    std::filesystem::path file_;
    std::unique_ptr<nv::IRuntimeCache> cache_;
    std::vector<char> saved_;  // the file's content, if the library accepts it
};

// What is assumed of versions without `isStreamCapturable`: they may allocate memory in a run.
constexpr bool capturable_by_default = false;
#else
constexpr bool capturable_by_default = true;
#endif

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
    bool capturable(void* stream) override {
        return is_capturable(*context_, static_cast<cudaStream_t>(stream));
    }
    bool enqueue(void* stream) override {
        return context_->enqueueV3(static_cast<cudaStream_t>(stream));
    }

   private:
    // This is a template, so that it compiles with headers that lack the method.
    template <class AnyContext>
    static bool is_capturable(AnyContext& context, cudaStream_t stream) {
        if constexpr (requires { context.isStreamCapturable(stream); })
            return context.isStreamCapturable(stream);
        return capturable_by_default;
    }

    std::unique_ptr<nv::IExecutionContext> context_;
};

class CudaEngine : public TrtCudaEngine {
   public:
    explicit CudaEngine(nv::ICudaEngine* engine) : engine_(engine) {}
#ifdef TRT_MAJOR_RTX
    CudaEngine(nv::ICudaEngine* engine, KernelCache& kernels)
        : engine_(engine), config_(kernels.config(*engine)) {}
#endif

    std::int64_t scratch_size() const override { return engine_->getDeviceMemorySizeV2(); }
    int profiles() const override { return engine_->getNbOptimizationProfiles(); }
    std::map<std::string, Shape> shapes() const override {
        std::map<std::string, Shape> result;
        for (int i = 0; i < engine_->getNbIOTensors(); ++i) {
            const char* name = engine_->getIOTensorName(i);
            const nv::Dims sizes = engine_->getTensorShape(name);
            result.emplace(name, Shape(sizes.d, sizes.d + sizes.nbDims));
        }
        return result;
    }
    std::optional<std::map<std::string, std::string>> aliases() const override {
        return aliases_of(*engine_);
    }
    std::unique_ptr<TrtContext> create_context() override {
#ifdef TRT_MAJOR_RTX
        auto* context =
            config_ == nullptr ? nullptr : engine_->createExecutionContext(config_.get());
#else
        auto* context =
            engine_->createExecutionContext(nv::ExecutionContextAllocationStrategy::kUSER_MANAGED);
#endif
        return context == nullptr ? nullptr : std::make_unique<Context>(context);
    }

   private:
    // This is a template, so that it compiles with headers that lack the method.
    template <class AnyEngine>
    static std::optional<std::map<std::string, std::string>> aliases_of(AnyEngine& engine) {
        std::optional<std::map<std::string, std::string>> result;
        if constexpr (requires { engine.getAliasedInputTensor(""); }) {
            result.emplace();
            for (int i = 0; i < engine.getNbIOTensors(); ++i) {
                const char* name = engine.getIOTensorName(i);
                if (engine.getTensorIOMode(name) != nv::TensorIOMode::kOUTPUT) continue;
                if (const char* source = engine.getAliasedInputTensor(name))
                    result->emplace(name, source);
            }
        }
        return result;
    }

    std::unique_ptr<nv::ICudaEngine> engine_;
#ifdef TRT_MAJOR_RTX
    std::unique_ptr<nv::IRuntimeConfig> config_;
#endif
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
        if (engine == nullptr) return nullptr;
#ifdef TRT_MAJOR_RTX
        return std::make_unique<CudaEngine>(engine, kernels_);
#else
        return std::make_unique<CudaEngine>(engine);
#endif
    }
    std::string take_errors() override { return logger_.take(); }
#ifdef TRT_MAJOR_RTX
    void use_kernels(const std::filesystem::path& file) override { kernels_.use(file); }
    void save_kernels() override { kernels_.save(); }
#else
    void use_kernels(const std::filesystem::path&) override {}
    void save_kernels() override {}
#endif

   private:
    void* handle_;
    Logger logger_;
    std::unique_ptr<nv::IRuntime> runtime_;
#ifdef TRT_MAJOR_RTX
    KernelCache kernels_;
#endif
};

}  // namespace

std::unique_ptr<TrtApi> PASS_TRT_MAKE(void* handle) { return std::make_unique<Api>(handle); }

}  // namespace pass
