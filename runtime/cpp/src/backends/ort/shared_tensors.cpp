#include "backends/ort/shared_tensors.h"

#include "bundle/noise.h"
#include "errors.h"

namespace pass {

namespace {

constexpr const char* head_file = "tail.head.data";
constexpr std::size_t alignment = 64;  // of the arrays in the draft head's file

std::size_t bytes_of(const std::vector<std::int64_t>& shape, ONNXTensorElementDataType type) {
    std::size_t size = type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ? 2 : 4;
    for (std::int64_t length : shape) size *= static_cast<std::size_t>(length);
    return size;
}

}  // namespace

SharedTensors::SharedTensors(std::shared_ptr<const OrtLibrary> library, const std::filesystem::path& bundle,
                             const Manifest& manifest)
    : library_(std::move(library)) {
    const MappedFile& tables = *files_.emplace_back(std::make_unique<MappedFile>(bundle / noise_tables_file));
    const std::vector<std::int64_t> table{
        static_cast<std::int64_t>(tables.size() / 2 / noise_row / sizeof(std::int32_t)), noise_row};
    add("noise_table_1", tables, 0, table, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
    add("noise_table_2", tables, tables.size() / 2, table, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
    if (!manifest.lookahead.head) return;

    const MappedFile& head = *files_.emplace_back(std::make_unique<MappedFile>(bundle / head_file));
    const std::int64_t rank = manifest.lookahead.head->rank, width = manifest.lookahead.head->width;
    const std::pair<const char*, std::vector<std::int64_t>> arrays[] = {
        {"head_table", {manifest.model.vocab_size, rank}},
        {"head_hidden", {manifest.model.hidden_size, width}},
        {"head_token", {rank, width}},
        {"head_state", {width, width}},
        {"head_bias", {width}},
        {"head_out", {width, rank}},
    };
    std::size_t offset = 0;
    for (const auto& [name, shape] : arrays) {
        const auto type = offset == 0 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
        add(name, head, offset, shape, type);
        offset += (bytes_of(shape, type) + alignment - 1) / alignment * alignment;
    }
}

void SharedTensors::add(const std::string& name, const MappedFile& file, std::size_t offset,
                        std::vector<std::int64_t> shape, ONNXTensorElementDataType type) {
    const OrtApi& api = library_->api();
    const std::size_t size = bytes_of(shape, type);
    if (offset + size > file.size()) throw Error("the bundle's tail data are too short; export the bundle again");
    OrtMemoryInfo* place = nullptr;
    library_->check(api.CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &place), "onnxruntime");
    const Owned<OrtMemoryInfo> held(place, api.ReleaseMemoryInfo);
    OrtValue* value = nullptr;
    library_->check(
        api.CreateTensorWithDataAsOrtValue(place, file.data() + offset, size, shape.data(), shape.size(), type, &value),
        "onnxruntime");
    values_.emplace_back(name, Owned<OrtValue>(value, api.ReleaseValue));
}

}  // namespace pass
