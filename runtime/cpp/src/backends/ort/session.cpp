#include "backends/ort/session.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>

#include "backends/ort/threads.h"
#include "bundle/metadata.h"
#include "errors.h"

namespace pass {

namespace {

ONNXTensorElementDataType element_type(const std::string& dtype) {
    if (dtype == "int64") return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    if (dtype == "bool") return ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
    if (dtype == "float16") return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    if (dtype == "bfloat16") return ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}

Owned<OrtValue> tensor_on(const OrtLibrary& library, const OrtMemoryInfo* place, const BoundTensor& tensor) {
    std::size_t size = item_size(tensor.dtype);
    for (std::int64_t length : tensor.shape) size *= static_cast<std::size_t>(length);
    OrtValue* value = nullptr;
    library.check(library.api().CreateTensorWithDataAsOrtValue(place, tensor.address, size, tensor.shape.data(),
                                                               tensor.shape.size(), element_type(tensor.dtype), &value),
                  "onnxruntime cannot take " + tensor.name);
    return {value, library.api().ReleaseValue};
}

// The name, type and shape of a tensor, in which a graph and its manifest must agree.
struct Kind {
    std::string name;
    ONNXTensorElementDataType type;
    std::string shape;

    auto operator<=>(const Kind&) const = default;
};

std::string shape_text(const std::vector<std::string>& sizes) {
    std::string text;
    for (const std::string& size : sizes) text += (text.empty() ? "" : ", ") + size;
    return "[" + text + "]";
}

std::string shape_text(const Tensor& tensor) {
    std::vector<std::string> sizes;
    for (const Dimension& size : tensor.shape) {
        const auto* number = std::get_if<std::int64_t>(&size);
        sizes.push_back(number != nullptr ? std::to_string(*number) : "'" + std::get<std::string>(size) + "'");
    }
    return shape_text(sizes);
}

Kind kind_of(const OrtLibrary& library, std::string name, OrtTypeInfo* info) {
    const OrtApi& api = library.api();
    const Owned<OrtTypeInfo> held(info, api.ReleaseTypeInfo);
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    library.check(api.CastTypeInfoToTensorInfo(info, &tensor), "onnxruntime");
    Kind found{std::move(name), ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED, "[]"};
    if (tensor == nullptr) return found;
    std::size_t rank = 0;
    library.check(api.GetTensorElementType(tensor, &found.type), "onnxruntime");
    library.check(api.GetDimensionsCount(tensor, &rank), "onnxruntime");
    std::vector<std::int64_t> sizes(rank);
    std::vector<const char*> names(rank, "");
    library.check(api.GetDimensions(tensor, sizes.data(), rank), "onnxruntime");
    library.check(api.GetSymbolicDimensions(tensor, names.data(), rank), "onnxruntime");
    std::vector<std::string> texts;
    for (std::size_t i = 0; i < rank; ++i) {
        texts.push_back(*names[i] != '\0' ? "'" + std::string(names[i]) + "'" : std::to_string(sizes[i]));
    }
    found.shape = shape_text(texts);
    return found;
}

}  // namespace

OrtGraph::OrtGraph(std::shared_ptr<const OrtLibrary> library, const Device& device, const std::filesystem::path& path,
                   int threads, const SharedTensors* shared)
    : library_(std::move(library)), device_(device), session_(nullptr, library_->api().ReleaseSession) {
    for (std::size_t attempt = 0; session_ == nullptr; ++attempt) {
        try {
            const Owned<OrtSessionOptions> options = session_options(threads, shared);
            append_provider(*library_, options.get(), device_, device_.options[attempt]);
            LateThreads workers;
            workers.give_to(*library_, options.get());
            OrtSession* session = nullptr;
            OrtStatus* status =
                library_->api().CreateSession(library_->environment(), path.c_str(), options.get(), &session);
            workers.begin();
            library_->check(status, "onnxruntime cannot load " + path.string());
            session_.reset(session);
        } catch (const Error&) {
            if (attempt + 1 == device_.options.size()) throw;
        }
    }
}

Owned<OrtSessionOptions> OrtGraph::session_options(int threads, const SharedTensors* shared) const {
    const OrtApi& api = library_->api();
    OrtSessionOptions* made = nullptr;
    library_->check(api.CreateSessionOptions(&made), "onnxruntime");
    Owned<OrtSessionOptions> options(made, api.ReleaseSessionOptions);
    library_->check(api.SetSessionLogSeverityLevel(made, ORT_LOGGING_LEVEL_ERROR), "onnxruntime");
    library_->check(api.SetIntraOpNumThreads(made, threads), "onnxruntime");
    // A memory pattern would be kept for every shape, and passes have many shapes.
    const bool on_cpu = std::strcmp(device_.name, "cpu") == 0;
    library_->check(on_cpu ? api.DisableMemPattern(made) : api.EnableMemPattern(made), "onnxruntime");
    if (shared != nullptr) {
        for (const auto& [name, value] : shared->values()) {
            library_->check(api.AddInitializer(made, name.c_str(), value.get()), "onnxruntime");
        }
    }
    return options;
}

void OrtGraph::check(const Graph& described, const Manifest* manifest) const {
    check_tensors(described, true);
    check_tensors(described, false);
    if (manifest != nullptr) check_metadata(*manifest);
}

void OrtGraph::check_tensors(const Graph& described, bool inputs) const {
    const OrtApi& api = library_->api();
    OrtAllocator* allocator = nullptr;
    library_->check(api.GetAllocatorWithDefaultOptions(&allocator), "onnxruntime");
    std::size_t count = 0;
    library_->check((inputs ? api.SessionGetInputCount : api.SessionGetOutputCount)(session_.get(), &count),
                    "onnxruntime");
    std::set<Kind> found, listed;
    for (std::size_t i = 0; i < count; ++i) {
        char* name = nullptr;
        library_->check(
            (inputs ? api.SessionGetInputName : api.SessionGetOutputName)(session_.get(), i, allocator, &name),
            "onnxruntime");
        const std::string copied = name;
        library_->check(api.AllocatorFree(allocator, name), "onnxruntime");
        OrtTypeInfo* info = nullptr;
        library_->check((inputs ? api.SessionGetInputTypeInfo : api.SessionGetOutputTypeInfo)(session_.get(), i, &info),
                        "onnxruntime");
        found.insert(kind_of(*library_, copied, info));
    }
    for (const Tensor& tensor : inputs ? described.inputs : described.outputs) {
        listed.insert({tensor.name, element_type(tensor.dtype), shape_text(tensor)});
    }
    std::vector<Kind> differing;
    std::set_symmetric_difference(found.begin(), found.end(), listed.begin(), listed.end(),
                                  std::back_inserter(differing));
    if (!differing.empty()) {
        throw Error("the manifest and " + described.file + " differ in " + differing.front().name + " " +
                    differing.front().shape + "; export the bundle again");
    }
}

void OrtGraph::check_metadata(const Manifest& manifest) const {
    const OrtApi& api = library_->api();
    OrtAllocator* allocator = nullptr;
    library_->check(api.GetAllocatorWithDefaultOptions(&allocator), "onnxruntime");
    OrtModelMetadata* metadata = nullptr;
    library_->check(api.SessionGetModelMetadata(session_.get(), &metadata), "onnxruntime");
    const Owned<OrtModelMetadata> held(metadata, api.ReleaseModelMetadata);
    char* value = nullptr;
    library_->check(api.ModelMetadataLookupCustomMetadataMap(metadata, allocator, "pass_toolkit", &value),
                    "onnxruntime");
    const std::string stated = value == nullptr ? "{}" : value;
    if (value != nullptr) library_->check(api.AllocatorFree(allocator, value), "onnxruntime");
    check_trunk_metadata(manifest, stated);
}

int next_cuda_graph() {
    static std::atomic<int> next = 0;
    return ++next;
}

BoundGraph::BoundGraph(const OrtGraph& graph, const std::vector<BoundTensor>& inputs,
                       const std::vector<BoundTensor>& outputs, int cuda_graph)
    : graph_(&graph),
      binding_(nullptr, graph.library().api().ReleaseIoBinding),
      options_(nullptr, graph.library().api().ReleaseRunOptions) {
    const OrtLibrary& library = graph.library();
    const OrtApi& api = library.api();
    OrtMemoryInfo* place = nullptr;
    library.check(api.CreateMemoryInfo(graph.device().memory, OrtDeviceAllocator, 0, OrtMemTypeDefault, &place),
                  "onnxruntime");
    const Owned<OrtMemoryInfo> held(place, api.ReleaseMemoryInfo);
    OrtIoBinding* binding = nullptr;
    library.check(api.CreateIoBinding(graph.session(), &binding), "onnxruntime");
    binding_.reset(binding);
    for (const BoundTensor& tensor : inputs) {
        values_.push_back(tensor_on(library, place, tensor));
        library.check(api.BindInput(binding, tensor.name.c_str(), values_.back().get()), "onnxruntime");
    }
    for (const BoundTensor& tensor : outputs) {
        values_.push_back(tensor_on(library, place, tensor));
        library.check(api.BindOutput(binding, tensor.name.c_str(), values_.back().get()), "onnxruntime");
    }
    OrtRunOptions* options = nullptr;
    library.check(api.CreateRunOptions(&options), "onnxruntime");
    options_.reset(options);
    const std::string id = std::to_string(cuda_graph);
    library.check(api.AddRunConfigEntry(options, "gpu_graph_id", id.c_str()), "onnxruntime");
}

void BoundGraph::run() const {
    const OrtLibrary& library = graph_->library();
    library.check(library.api().RunWithBinding(graph_->session(), options_.get(), binding_.get()),
                  "onnxruntime failed to run a pass");
}

}  // namespace pass
