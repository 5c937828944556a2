#include "backends/ort/kernels.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <vector>

#include "backends/ort/protobuf.h"
#include "errors.h"

namespace pass {

namespace {

using protobuf::encode;

constexpr std::int64_t max_rows = 16;  // the rows of a probe, of which a few are also run alone
// The sizes of a probe's weights: blocks of inputs, and outputs.
constexpr std::int64_t blocks = 4, outputs = 64;
// The value of MatMulNBits's attribute with which rows are rounded to 8 bits.
constexpr std::uint64_t accuracy_level = 4;
constexpr std::uint64_t ir_version = 10, opset = 21;
constexpr auto float32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr auto uint8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
constexpr auto int8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
constexpr auto int32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;

// A constant input of a probe. bytes: its elements.
struct Weights {
    const char* name;
    std::vector<std::int64_t> shape;
    ONNXTensorElementDataType type;
    std::string bytes;
};

// A graph with one node `op`, which reads the input `rows` [M,columns] and `weights`, and writes
// `result` [M,N]. columns: 0 allows any number. sizes: the node's integer attributes.
struct Probe {
    const char* op;
    const char* domain;
    std::vector<std::pair<const char*, std::uint64_t>> sizes;
    std::vector<Weights> weights;
    std::int64_t columns;
    ONNXTensorElementDataType input, output;  // the types of `rows` and `result`

    std::string model() const;
};

// A ValueInfoProto of the shape [M,columns]. `encode` gets the numbers of fields in onnx.proto.
std::string value_info(const std::string& name, ONNXTensorElementDataType type,
                       std::int64_t columns) {
    const std::string last =
        columns == 0 ? encode(2, "N") : encode(1, static_cast<std::uint64_t>(columns));
    const std::string shape = encode(1, encode(2, "M")) + encode(1, last);
    return encode(1, name) +
           encode(2, encode(1, encode(1, static_cast<std::uint64_t>(type)) + encode(2, shape)));
}

std::string Probe::model() const {
    std::string node = encode(1, "rows"), tensors;
    for (const Weights& each : weights) {
        node += encode(1, each.name);
        std::string tensor;
        for (const std::int64_t size : each.shape)
            tensor += encode(1, static_cast<std::uint64_t>(size));
        tensor += encode(2, static_cast<std::uint64_t>(each.type)) + encode(8, each.name);
        tensors += encode(5, tensor + encode(9, each.bytes));
    }
    node += encode(2, "result") + encode(4, op) + encode(7, domain);
    for (const auto& [name, size] : sizes)
        node += encode(5, encode(1, name) + encode(3, size) + encode(20, 2));  // 2 is INT
    const std::string graph = encode(1, node) + encode(2, "probe") + tensors +
                              encode(11, value_info("rows", input, columns)) +
                              encode(12, value_info("result", output, 0));
    const std::string microsoft = encode(1, "com.microsoft") + encode(2, 1);
    return encode(1, ir_version) + encode(8, microsoft) + encode(8, encode(2, opset)) +
           encode(7, graph);
}

template <class Value>
std::string bytes_of(const std::vector<Value>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)};
}

class ProbeSession {
   public:
    // Throws Error if ONNX Runtime cannot load the graph.
    ProbeSession(const OrtLibrary& library, const Probe& probe)
        : library_(library), input_(probe.input), session_(nullptr, library.api().ReleaseSession) {
        const OrtApi& api = library.api();
        const auto options = library.make(api.CreateSessionOptions, api.ReleaseSessionOptions);
        library.check(api.SetIntraOpNumThreads(options.get(), 1));
        library.check(api.SetSessionLogSeverityLevel(options.get(), ORT_LOGGING_LEVEL_ERROR));
        const std::string model = probe.model();
        OrtSession* made = nullptr;
        library.check(api.CreateSessionFromArray(library.environment(), model.data(), model.size(),
                                                 options.get(), &made),
                      "onnxruntime cannot test the CPU's kernels");
        session_.reset(made);
    }

    // The elements of `result` [M,N] for `rows` [M,columns].
    template <class Result, class Value>
    std::vector<Result> run(std::vector<Value> rows, std::int64_t columns) const {
        const OrtApi& api = library_.api();
        const std::int64_t count = static_cast<std::int64_t>(rows.size()) / columns;
        const auto memory = library_.make(api.CreateCpuMemoryInfo, api.ReleaseMemoryInfo,
                                          OrtArenaAllocator, OrtMemTypeDefault);
        const auto input = library_.tensor(memory.get(), reinterpret_cast<std::byte*>(rows.data()),
                                           rows.size() * sizeof(Value), {count, columns}, input_);
        const OrtValue* inputs[] = {input.get()};
        const char *input_names[] = {"rows"}, *output_names[] = {"result"};
        OrtValue* made = nullptr;
        library_.check(
            api.Run(session_.get(), nullptr, input_names, inputs, 1, output_names, 1, &made));
        const Owned<OrtValue> output(made, api.ReleaseValue);
        const auto info = library_.make(api.GetTensorTypeAndShape,
                                        api.ReleaseTensorTypeAndShapeInfo, output.get());
        std::size_t size = 0;
        library_.check(api.GetTensorShapeElementCount(info.get(), &size));
        void* data = nullptr;
        library_.check(api.GetTensorMutableData(output.get(), &data));
        const auto* first = static_cast<const Result*>(data);
        return {first, first + size};
    }

   private:
    const OrtLibrary& library_;
    ONNXTensorElementDataType input_;
    Owned<OrtSession> session_;
};

// Numbers from -2 to 2, the same in every process.
std::vector<float> random_numbers(std::int64_t count) {
    std::mt19937 random;  // NOLINT: always the same seed
    std::vector<float> result(static_cast<std::size_t>(count));
    for (float& value : result) value = static_cast<float>(random()) / 1073741824.0F - 2.0F;
    return result;
}

// `Kernels::exact_sums`. The largest codes give the largest sums, which saturate first.
bool sums_are_exact(const OrtLibrary& library) {
    constexpr std::int64_t inputs = 64, columns = 16;
    const Weights weights{
        "weights", {inputs, columns}, int8, std::string(inputs * columns, '\x7f')};
    const ProbeSession session(library, {"MatMulInteger", "", {}, {weights}, inputs, uint8, int32});
    const auto sums = session.run<std::int32_t>(std::vector<std::uint8_t>(2 * inputs, 255), inputs);
    return std::all_of(sums.begin(), sums.end(),
                       [&](std::int32_t sum) { return sum == inputs * 255 * 127; });
}

// `Kernels::least_rows` of products with weights of this format.
std::optional<int> least_rows(const OrtLibrary& library, const BlockFormat& format) {
    const auto [bits, block_size] = format;
    const std::int64_t inputs = blocks * block_size, code_bytes = block_size * bits / 8;
    std::mt19937 random;  // NOLINT: always the same seed
    std::string codes(static_cast<std::size_t>(outputs * blocks * code_bytes), '\0');
    for (char& code : codes) code = static_cast<char>(random() >> 24);
    std::vector<float> scales(static_cast<std::size_t>(outputs * blocks));  // from 0.001 to 0.02
    for (float& scale : scales)
        scale = 0.001F + 0.019F * (static_cast<float>(random()) / 4294967296.0F);
    const ProbeSession session(library,
                               {"MatMulNBits",
                                "com.microsoft",
                                {{"K", static_cast<std::uint64_t>(inputs)},
                                 {"N", static_cast<std::uint64_t>(outputs)},
                                 {"bits", static_cast<std::uint64_t>(bits)},
                                 {"block_size", static_cast<std::uint64_t>(block_size)},
                                 {"accuracy_level", accuracy_level}},
                                {{"codes", {outputs, blocks, code_bytes}, uint8, std::move(codes)},
                                 {"scales", {outputs, blocks}, float32, bytes_of(scales)}},
                                inputs,
                                float32,
                                float32});
    const std::vector<float> rows = random_numbers(max_rows * inputs);
    const auto among_all = session.run<float>(rows, inputs);
    std::vector<std::int64_t> differing;
    for (const std::int64_t count : {1, 2, 3, 5, 9}) {
        const auto alone = session.run<float>(
            std::vector<float>(rows.begin(), rows.begin() + count * inputs), inputs);
        if (!std::equal(alone.begin(), alone.end(), among_all.begin())) differing.push_back(count);
    }
    if (differing.empty()) return 1;
    // Only a single row differs: kernels for one row add in another order than those for several.
    if (differing == std::vector<std::int64_t>{1}) return 2;
    return std::nullopt;
}

// `Kernels::equal_softmax`.
bool softmax_is_equal(const OrtLibrary& library) {
    constexpr std::ptrdiff_t rows = max_rows, columns = 32;
    const ProbeSession session(library, {"Softmax", "", {}, {}, 0, float32, float32});
    // Random scores of different sizes in many rows: another order of addition changes some sums.
    std::vector<float> scores = random_numbers(rows * columns);
    for (float& score : scores) score *= 3;
    for (std::ptrdiff_t count = 1; count < 8; ++count) {  // unmasked scores, less than a vector
        std::vector<float> masked = scores, few;
        for (std::ptrdiff_t row = 0; row < rows; ++row) {
            const auto first = masked.begin() + row * columns;
            few.insert(few.end(), first, first + count);
            std::fill(first + count, first + columns, -std::numeric_limits<float>::infinity());
        }
        const auto alone = session.run<float>(few, count),
                   among_masked = session.run<float>(masked, columns);
        for (std::ptrdiff_t row = 0; row < rows; ++row) {
            const auto first = alone.begin() + row * count;
            if (!std::equal(first, first + count, among_masked.begin() + row * columns))
                return false;
        }
    }
    return true;
}

Kernels run_probes(const OrtLibrary& library, const std::set<BlockFormat>& formats) {
    Kernels result{sums_are_exact(library), 1, softmax_is_equal(library)};
    for (const BlockFormat& format : formats) {
        const std::optional<int> rows = least_rows(library, format);
        result.least_rows = rows && result.least_rows
                                ? std::optional(std::max(*rows, *result.least_rows))
                                : std::nullopt;
    }
    return result;
}

}  // namespace

std::string Kernels::text() const {
    return std::string("8-bit sums ") + (exact_sums ? "exact" : "saturating") +
           ", numbers of rows " +
           (least_rows ? "equal from " + std::to_string(*least_rows) + " on" : "never equal") +
           ", softmax with masked entries " + (equal_softmax ? "equal" : "not equal");
}

std::set<BlockFormat> block_formats(const ModelInfo& model) {
    std::set<BlockFormat> result;
    if (!model.quantization) {
        // Older bundles do not list their formats; these are all that they can have.
        if (model.weights != "full") result = {{4, 32}, {8, 32}};
        return result;
    }
    const auto add = [&](const SchemeInfo& scheme) {
        if (!scheme.block_size || scheme.numbers == "fp8") return;
        result.emplace(scheme.numbers == "int4" ? 4 : 8, *scheme.block_size);
        // Offsets need the sums of blocks, which graphs compute by products with 4-bit codes.
        if (scheme.offsets) result.emplace(4, *scheme.block_size);
    };
    add(model.quantization->grid);
    if (model.quantization->lm_head) add(*model.quantization->lm_head);
    for (const auto& [name, scheme] : model.quantization->layers) add(scheme);
    return result;
}

Kernels find_kernels(const OrtLibrary& library, const Manifest& manifest) {
    static std::mutex mutex;
    // By the library's build and the formats.
    static std::map<std::pair<std::string, std::set<BlockFormat>>, Kernels> probed;
    const std::set<BlockFormat> formats = block_formats(manifest.model);
    const std::lock_guard lock(mutex);
    const std::pair key(library.build(), formats);
    if (const auto entry = probed.find(key); entry != probed.end()) return entry->second;
    return probed.emplace(key, run_probes(library, formats)).first->second;
}

bool needs_unsigned_weights(const Kernels& kernels, const std::filesystem::path& bundle,
                            const Manifest& manifest) {
    const auto& info = manifest.model.quantization;
    const bool rounds_activations =
        info ? info->activations != "full" : manifest.model.weights == "w8a8";
    if (!rounds_activations || kernels.exact_sums) return false;
    for (const DerivedTrunk& each : manifest.derived) {
        if (each.device != "cpu" || each.weight_zero_points) continue;
        throw Error(bundle.string() +
                    ": its 8-bit sums saturate on this CPU: export it again, or export it as int8");
    }
    return true;
}

}  // namespace pass
