// Implements api.h with NVIDIA's headers. It is compiled once for each library whose headers are
// given, and defines the function that PASS_TRT_MAKE names. The build renames the namespace
// `nvinfer1` in each, because the libraries have classes of the same names, whose inline functions
// the linker would merge.
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

namespace pass {

namespace {

namespace nv = nvinfer1;

constexpr std::size_t max_kept_errors = 4;  // the last ones, for error messages

// Writes messages to the log, and keeps the last errors.
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
            std::string line = message;
            for (char& character : line) {
                if (character == '\n') character = ' ';
            }
            const std::lock_guard lock(mutex_);
            errors_.push_back(std::move(line));
            if (errors_.size() > max_kept_errors) errors_.pop_front();
        } catch (const std::exception&) {  // no memory for a message
        }
    }

    std::mutex mutex_;
    std::deque<std::string> errors_;
};

#ifdef TRT_MAJOR_RTX
// A cache of compiled kernels. By default TensorRT-RTX compiles them in the background, and runs a
// slower kernel until then, which a captured graph would keep. Contexts made with `config` compile
// before they run. If the file cannot be read or written, kernels are only compiled again.
class Kernels {
   public:
    void use(const std::filesystem::path& file) { file_ = file; }

    std::unique_ptr<nv::IRuntimeConfig> config(nv::ICudaEngine& engine) {
        std::unique_ptr<nv::IRuntimeConfig> made(engine.createRuntimeConfig());
        if (made == nullptr) return nullptr;
        made->setExecutionContextAllocationStrategy(
            nv::ExecutionContextAllocationStrategy::kUSER_MANAGED);
        made->setDynamicShapesKernelSpecializationStrategy(
            nv::DynamicShapesKernelSpecializationStrategy::kEAGER);
        if (cache_ == nullptr) load(*made);
        if (cache_ == nullptr || !made->setRuntimeCache(*cache_)) {
            pass::log(
                LogLevel::warning,
                "the library refuses a cache of kernels, so every process compiles them again");
        }
        return made;
    }

    void save() {
        const std::unique_ptr<nv::IHostMemory> found(cache_ == nullptr ? nullptr
                                                                       : cache_->serialize());
        if (found == nullptr || file_.empty()) return;
        const char* first = static_cast<const char*>(found->data());
        const std::vector<char> bytes(first, first + found->size());
        if (bytes == saved_) return;
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
        // The library refuses a cache of another GPU, driver or version. It is replaced later.
        if (cache_ == nullptr || saved_.empty() ||
            !cache_->deserialize(saved_.data(), saved_.size()))
            saved_.clear();
    }

    std::filesystem::path file_;
    std::unique_ptr<nv::IRuntimeCache> cache_;
    std::vector<char> saved_;
};

constexpr bool capturable_by_default = false;  // RTX before 1.2 may allocate while it runs
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
        return ask_capturable(*context_, static_cast<cudaStream_t>(stream));
    }
    bool enqueue(void* stream) override {
        return context_->enqueueV3(static_cast<cudaStream_t>(stream));
    }

   private:
    // A template, so that it compiles with headers that lack the function.
    template <class Asked>
    static bool ask_capturable(Asked& context, cudaStream_t stream) {
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
    CudaEngine(nv::ICudaEngine* engine, Kernels& kernels)
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
        return ask_aliases(*engine_);
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
    template <class Asked>
    static std::optional<std::map<std::string, std::string>> ask_aliases(Asked& engine) {
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
            const auto ask = reinterpret_cast<std::int32_t (*)()>(dlsym(handle_, name.c_str()));
            if (ask != nullptr) result += (result.empty() ? "" : ".") + std::to_string(ask());
        }
        return result;
    }
    std::unique_ptr<TrtCudaEngine> deserialize(std::span<const std::byte> engine) override {
        auto* deserialized = runtime_->deserializeCudaEngine(engine.data(), engine.size());
        if (deserialized == nullptr) return nullptr;
#ifdef TRT_MAJOR_RTX
        return std::make_unique<CudaEngine>(deserialized, kernels_);
#else
        return std::make_unique<CudaEngine>(deserialized);
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
    Kernels kernels_;
#endif
};

}  // namespace

std::unique_ptr<TrtApi> PASS_TRT_MAKE(void* handle) { return std::make_unique<Api>(handle); }

}  // namespace pass
