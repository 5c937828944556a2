#include "backends/ort/session.h"

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

}  // namespace

OrtGraph::OrtGraph(std::shared_ptr<const OrtLibrary> library, const Device& device,
                   const OpenFiles& files, const std::string& file, int threads,
                   const std::filesystem::path& kernels)
    : library_(std::move(library)),
      file_(file),
      device_(device),
      session_(nullptr, library_->api().ReleaseSession) {
    const std::string& content = files.graph(file);
    captures_ = device.is_gpu;
    while (session_ == nullptr) {
        try {
            const Owned<OrtSessionOptions> options = session_options(files, threads, kernels);
            if (device_.is_gpu) add_cuda(*library_, options.get(), device_.ordinal, captures_);
            OrtSession* session = nullptr;
            library_->check(
                library_->api().CreateSessionFromArray(library_->environment(), content.data(),
                                                       content.size(), options.get(), &session),
                "onnxruntime cannot load " + files.path(file).string());
            session_.reset(session);
        } catch (const Error& error) {
            if (!captures_) throw;
            captures_ = false;  // captures fail for a graph with a node on the CPU
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
    library_->check((device_.is_gpu ? api.EnableMemPattern : api.DisableMemPattern)(options.get()));
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
