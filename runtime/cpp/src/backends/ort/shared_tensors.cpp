#include "backends/ort/shared_tensors.h"

#include "bundle/noise.h"
#include "bundle/tensors.h"
#include "errors.h"

namespace pass {

SharedTensors::SharedTensors(std::shared_ptr<const OrtLibrary> library, const std::filesystem::path& bundle,
                             const Manifest& manifest)
    : library_(std::move(library)) {
    const MappedFile& tables = *files_.emplace_back(std::make_unique<MappedFile>(bundle / noise_tables_file));
    const std::vector<std::int64_t> table{
        static_cast<std::int64_t>(tables.size() / 2 / noise_row / sizeof(std::int32_t)), noise_row};
    const std::size_t half = static_cast<std::size_t>(table[0] * table[1]) * sizeof(std::int32_t);
    add("noise_table_1", tables, 0, half, table, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
    add("noise_table_2", tables, tables.size() / 2, half, table, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
    if (!manifest.lookahead.head) return;

    const MappedFile& head = *files_.emplace_back(std::make_unique<MappedFile>(bundle / head_file));
    for (const HeadArray& array : head_arrays(manifest.model, *manifest.lookahead.head)) {
        const auto type = array.item == 2 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
        add(array.name, head, static_cast<std::size_t>(array.offset), static_cast<std::size_t>(array.bytes),
            array.shape, type);
    }
}

void SharedTensors::add(const std::string& name, const MappedFile& file, std::size_t offset, std::size_t size,
                        const std::vector<std::int64_t>& shape, ONNXTensorElementDataType type) {
    const OrtApi& api = library_->api();
    if (offset + size > file.size()) throw Error("the bundle's tail data are too short; export the bundle again");
    const auto place =
        library_->make(api.CreateCpuMemoryInfo, api.ReleaseMemoryInfo, OrtArenaAllocator, OrtMemTypeDefault);
    values_.emplace_back(name, library_->tensor(place.get(), file.data() + offset, size, shape, type));
}

}  // namespace pass
