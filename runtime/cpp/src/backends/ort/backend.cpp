#include "backends/ort/backend.h"

#include <algorithm>
#include <cstring>

#include "backends/capabilities.h"
#include "backends/cuda.h"
#include "errors.h"
#include "log.h"

namespace pass {

namespace {

// In keys of bound_tails_, in the place of a sampler.
constexpr int logprobs_graph = -1, processors_graph = -2;

Capabilities capabilities_of(const Manifest& manifest, const LoadOptions& options,
                             const OrtBackend::Engine& engine) {
    const bool on_cpu = !engine.device.is_gpu;
    if (manifest.model.dtype == "bfloat16") {
        throw Error(
            "bf16 bundles run on TensorRT engines; for ONNX Runtime export with --dtype fp16 or "
            "fp32");
    }
    const std::int64_t capacity = options.capacity.value_or(manifest.model.max_capacity);
    if (capacity > manifest.model.max_capacity) {
        throw Error("capacity " + std::to_string(capacity) + " is more than the " +
                    std::to_string(manifest.model.max_capacity) + " tokens of the model");
    }
    Capabilities result;
    result.device = engine.device.name();
    result.vocab_size = manifest.model.vocab_size;
    result.capacities = on_cpu ? stepped_capacities(capacity) : doubling_capacities(capacity);
    result.prefill_widths = {256, 64, 16, 1};
    result.batch_sizes = batch_sizes_up_to(options.max_batch_size);
    result.same_entries = !engine.kernels.name.empty();
    result.verifying = verifying_windows(manifest);
    if (on_cpu) return result;
    result.chunk_capacities = wide_chunks(manifest.model, result.capacities);
    for (const auto& [width, largest_capacity] : result.chunk_capacities)  // widths rise in the map
        result.prefill_widths.insert(result.prefill_widths.begin(), width);
    return result;
}

OrtBackend::Engine open_engine(const Manifest& manifest, const LoadOptions& options) {
    OrtBackend::Engine engine{OrtLibrary::open(options.onnxruntime), {}, nullptr};
    engine.device = choose_device(*engine.library, options.device);
    if (engine.device.is_gpu) {
        engine.memory = std::make_unique<Cuda>(CudaApi::open(), engine.device.ordinal);
        return engine;
    }
    engine.memory = std::make_unique<HostMemory>(options.allocator);
    if (manifest.derived_trunk(engine.device.name(), 1) != nullptr) engine.kernels = find_kernels();
    return engine;
}

}  // namespace

OrtBackend::OrtBackend(std::filesystem::path bundle, const Manifest& manifest,
                       const LoadOptions& options)
    : OrtBackend(std::move(bundle), manifest, options, open_engine(manifest, options)) {}

OrtBackend::OrtBackend(std::filesystem::path bundle, const Manifest& manifest,
                       const LoadOptions& options, Engine engine)
    : Backend(manifest, capabilities_of(manifest, options, engine), std::move(engine.memory),
              OpenFiles::of_graphs(bundle, manifest)),
      bundle_(std::move(bundle)),
      engine_(std::move(engine)) {
    open_trunks(options);
    if (engine_.device.is_gpu)
        thread_ = std::make_unique<OneThread>([this] { return for_this_thread(); });
}

// Opens the trunk, and a second one for passes without look-ahead rows, if the bundle has one.
void OrtBackend::open_trunks(const LoadOptions& options) {
    const Kernels& kernels = engine_.kernels;
    const auto file_of = [&](bool lookahead_rows) {
        const DerivedTrunk* derived =
            manifest_.derived_trunk(engine_.device.name(), options.max_batch_size, lookahead_rows);
        const bool runs = derived != nullptr && kernels.missing.empty();
        return runs ? derived->file : manifest_.trunk.file;
    };
    const std::string full = file_of(true), plain = file_of(false);
    if (!manifest_.files.contains(full)) {
        throw Error(
            bundle_.string() + " cannot run: " +
            (kernels.missing.empty()
                 ? "it was exported for the CPU alone: export it with --target any"
                 : "its kernels are missing (" + kernels.missing + "): " + how_to_get_kernels));
    }
    if (!kernels.missing.empty()) {
        log(LogLevel::warning,
            "ONNX Runtime's kernels run in place of ours, which are missing (" + kernels.missing +
                "): passes are slower, and near-ties may flip; " + how_to_get_kernels);
    }
    if (!kernels.name.empty())
        log(LogLevel::info, "kernels " + kernels.name + " of " + kernels.path.string());
    const auto open = [&](const std::string& file) {
        auto trunk = std::make_unique<OrtGraph>(engine_.library, engine_.device, files_, file,
                                                options.threads, kernels.path);
        note_uncaptured(*trunk);
        return trunk;
    };
    trunk_ = open(full);
    if (plain != full) plain_trunk_ = open(plain);
}

void OrtBackend::note_uncaptured(const OrtGraph& graph) {
    if (!graph.why_not_captured().empty()) uncaptured_[graph.file()] = graph.why_not_captured();
}

void OrtBackend::resize(std::int64_t capacity, std::span<const std::int64_t> lengths) {
    Backend::resize(capacity, lengths);
    bound_trunks_.clear();
    bound_prefills_.clear();
}

void OrtBackend::in_thread(const std::function<void()>& work) {
    if (thread_ != nullptr) {
        thread_->run(work);
    } else {
        work();
    }
}

void OrtBackend::run_bound(BoundGraph& bound) {
    try {
        bound.run();
    } catch (const Error&) {
        memory_->check_device();
        throw;
    }
}

void OrtBackend::run_trunk(const Window& window, int batch) {
    in_thread([&] {
        run_bound(bound_trunks_.get({window.name, batch}, [&](int graph_id) {
            return bind_trunk(graph_id, window, batch);
        }));
    });
}

void OrtBackend::run_prefill(int slot, const Window& window) {
    in_thread([&] {
        run_bound(bound_prefills_.get({window.width(), slot}, [&](int graph_id) {
            return bind_trunk(graph_id, window, 1, slot, true);
        }));
    });
}

void OrtBackend::run_tail(const PassKind& kind) {
    in_thread([&] { run_tails(kind); });
}

Backend::PassResult OrtBackend::run_pass(const PassKind& kind) {
    PassResult result;
    in_thread([&] { result = Backend::run_pass(kind); });
    return result;
}

void OrtBackend::run_tails(const PassKind& kind) {
    const std::string& window = kind.window.name;
    const bool processed = kind.touched_count > 0;
    if (processed) {
        run_bound(bound_tails_.get(
            {window, processors_graph, kind.batch, kind.touched_count}, [&](int graph_id) {
                return bind(graph_id, tail_session(manifest_.processors),
                            bindings_.processors(kind.window, kind.batch, kind.touched_count));
            }));
    }
    run_bound(bound_tails_.get(
        {window, static_cast<int>(kind.sampler), kind.batch, processed}, [&](int graph_id) {
            return bind(graph_id, tail_session(bindings_.tail_graph(kind.window, kind.sampler)),
                        bindings_.tail(kind.window, kind.sampler, kind.batch, processed));
        }));
    if (!kind.logprobs) return;
    run_bound(bound_tails_.get({window, logprobs_graph, kind.batch, 0}, [&](int graph_id) {
        return bind(graph_id, tail_session(manifest_.logprobs),
                    bindings_.logprobs(kind.window, kind.batch));
    }));
}

std::vector<BoundTensor> OrtBackend::bound_tensors(const std::vector<Binding>& bindings) {
    std::vector<BoundTensor> result;
    for (const Binding& binding : bindings)
        result.push_back(
            {binding.tensor, binding.dtype, binding.shape, buffers_.address_of(binding)});
    return result;
}

BoundGraph OrtBackend::bind(int graph_id, const OrtGraph& graph, const Bindings& bindings,
                            const std::vector<BoundTensor>& past,
                            const std::vector<BoundTensor>& present) {
    std::vector<BoundTensor> inputs = bound_tensors(bindings.inputs),
                             outputs = bound_tensors(bindings.outputs);
    const auto on_failure = [this, file = graph.file()](const std::string& reason) {
        note_uncaptured(file, reason);
    };
    Capture capture{graph_id, memory_.get(), overwritten_inputs(inputs, outputs), on_failure};
    inputs.insert(inputs.end(), past.begin(), past.end());
    outputs.insert(outputs.end(), present.begin(), present.end());
    return {graph, inputs, outputs, std::move(capture)};
}

void OrtBackend::note_uncaptured(const std::string& file, const std::string& reason) {
    const bool is_new = uncaptured_.insert_or_assign(file, reason).second;
    if (is_new)  // no warning for every window, batch and slot
        log(LogLevel::warning, file + " runs without a CUDA graph, and so more slowly: " + reason);
}

// The cache's inputs and outputs share memory, so that no pass copies the cache.
BoundGraph OrtBackend::bind_trunk(int graph_id, const Window& window, int batch, int slot,
                                  bool prefill) {
    std::vector<BoundTensor> past, present;
    const auto shape = cache_.shape(batch);
    const Shape sizes(shape.begin(), shape.end());
    for (std::size_t i = 0; i < cache_.names().size(); ++i) {
        past.push_back({cache_.names()[i], cache_.dtype(), sizes, cache_.address(i, slot)});
        present.push_back(past.back());
        present.back().name = present_prefix + past.back().name.substr(std::strlen(cache_prefix));
    }
    const bool plain = window.lookahead_rows() == 0 && plain_trunk_ != nullptr;
    return bind(graph_id, plain ? *plain_trunk_ : *trunk_, bindings_.trunk(window, batch, prefill),
                past, present);
}

// Tails get one thread each: a pool of threads would spin on the cores that the trunk's pass needs.
const OrtGraph& OrtBackend::tail_session(const Graph& graph) {
    std::unique_ptr<OrtGraph>& tail = tails_[graph.file];
    if (tail == nullptr) {
        auto opened =
            std::make_unique<OrtGraph>(engine_.library, engine_.device, files_, graph.file, 1);
        note_uncaptured(*opened);
        tail = std::move(opened);
    }
    return *tail;
}

}  // namespace pass
