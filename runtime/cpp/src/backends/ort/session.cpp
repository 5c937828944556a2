#include "backends/ort/session.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>

#include "errors.h"
#include "log.h"

namespace pass {

ONNXTensorElementDataType element_type(const std::string& dtype) {
    if (dtype == "int64") return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    if (dtype == "int32") return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    if (dtype == "bool") return ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
    if (dtype == "float16") return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    if (dtype == "bfloat16") return ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}

namespace {

// With this option, of version 1.31, ONNX Runtime copies no weights that it is given in memory.
constexpr const char* no_copies_option = "session.use_external_initializer_file_buffers_directly";

// Workers that begin when the session has been created. ONNX Runtime's own would spin while they
// wait, and take the cores that hash the bundle's files.
class LateThreads {
   public:
    // This object must live until the session is created.
    void give_to(const OrtLibrary& library, OrtSessionOptions* options) {
        const OrtApi& api = library.api();
        library.check(api.SessionOptionsSetCustomCreateThreadFn(options, create));
        library.check(api.SessionOptionsSetCustomThreadCreationOptions(options, &gate_));
        library.check(api.SessionOptionsSetCustomJoinThreadFn(options, join));
    }
    void begin() const { open(*gate_); }

   private:
    using Gate = std::atomic_flag;  // set when threads may work
    struct Worker {
        std::shared_ptr<Gate> gate;
        std::thread thread;
    };

    static void open(Gate& gate) {
        gate.test_and_set();
        gate.notify_all();
    }
    // Null if the system has no thread left: then the session cannot be created.
    static OrtCustomThreadHandle create(void* gate, OrtThreadWorkerFn work, void* argument) {
        try {
            auto worker = std::make_unique<Worker>();
            worker->gate = *static_cast<std::shared_ptr<Gate>*>(gate);
            worker->thread = std::thread([gate = worker->gate, work, argument] {
                gate->wait(false);
                work(argument);
            });
            return reinterpret_cast<OrtCustomThreadHandle>(worker.release());
        } catch (const std::exception&) {
            return nullptr;
        }
    }
    // Also called if the session could not be created.
    static void join(OrtCustomThreadHandle thread) {
        const std::unique_ptr<Worker> worker(
            reinterpret_cast<Worker*>(const_cast<OrtCustomHandleType*>(thread)));
        open(*worker->gate);
        worker->thread.join();
    }

    std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
};

}  // namespace

OrtGraph::OrtGraph(std::shared_ptr<const OrtLibrary> library, const Device& device,
                   const OpenFiles& files, const std::string& file, int threads,
                   const std::filesystem::path& kernels)
    : library_(std::move(library)),
      file_(file),
      device_(device),
      session_(nullptr, library_->api().ReleaseSession) {
    const std::string& content = files.graph(file);
    for (std::size_t index = 0; session_ == nullptr; ++index) {
        try {
            const Owned<OrtSessionOptions> options = session_options(files, threads, kernels);
            append_provider(*library_, options.get(), device_, device_.options[index]);
            LateThreads workers;
            workers.give_to(*library_, options.get());
            OrtSession* session = nullptr;
            OrtStatus* status = library_->api().CreateSessionFromArray(
                library_->environment(), content.data(), content.size(), options.get(), &session);
            session_.reset(session);
            workers.begin();
            library_->check(status, "onnxruntime cannot load " + files.path(file).string());
            captures_ = device_.captures(index);
        } catch (const Error& error) {
            if (index + 1 == device_.options.size()) throw;
            why_not_captured_ = error.what();
            log(LogLevel::warning, why_not_captured_ + " (it is tried without CUDA graphs)");
        }
    }
}

Owned<OrtSessionOptions> OrtGraph::session_options(const OpenFiles& files, int threads,
                                                   const std::filesystem::path& kernels) const {
    const OrtApi& api = library_->api();
    Owned<OrtSessionOptions> options =
        library_->make(api.CreateSessionOptions, api.ReleaseSessionOptions);
    library_->check(api.SetSessionLogId(options.get(), file_.c_str()));
    library_->check(api.SetSessionLogSeverityLevel(options.get(), severity_of(log_level())));
    library_->check(api.SetIntraOpNumThreads(options.get(), threads));
    // ONNX Runtime would keep a memory pattern for every shape, and on the CPU there are many.
    library_->check(
        (device_.on_cpu() ? api.DisableMemPattern : api.EnableMemPattern)(options.get()));
    if (!kernels.empty())
        library_->check(api.RegisterCustomOpsLibrary_V2(options.get(), kernels.c_str()));
    std::vector<const char*> names;
    std::vector<char*> addresses;
    std::vector<std::size_t> sizes;
    for (const auto& [name, data] : files.data()) {
        names.push_back(name.c_str());
        addresses.push_back(reinterpret_cast<char*>(data->data()));
        sizes.push_back(data->size());
    }
    library_->check(api.AddSessionConfigEntry(options.get(), no_copies_option, "1"));
    library_->check(api.AddExternalInitializersFromFilesInMemory(
        options.get(), names.data(), addresses.data(), sizes.data(), names.size()));
    return options;
}

}  // namespace pass
