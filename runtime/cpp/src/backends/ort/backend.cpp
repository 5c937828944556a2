#include "backends/ort/backend.h"

#include <cstring>

#include "backends/capabilities.h"
#include "backends/ort/packed_weights.h"
#include "errors.h"
#include "log.h"

namespace pass {

namespace {

constexpr int logprobs_graph = -1, processors_graph = -2;  // in place of a sampler

Capabilities capabilities_of(const Manifest& manifest, const LoadOptions& options, const Device& device) {
    if (manifest.model.dtype == "bfloat16") {
        throw Error("bf16 bundles run on TensorRT engines; for ONNX Runtime export with --dtype fp16 or fp32");
    }
    const std::int64_t most = options.capacity.value_or(manifest.model.max_capacity);
    if (most > manifest.model.max_capacity) {
        throw Error("capacity " + std::to_string(most) + " is more than the " +
                    std::to_string(manifest.model.max_capacity) + " tokens of the model");
    }
    const std::string& weights = manifest.model.weights;
    const auto capacities = device.on_cpu() ? following_capacities(most) : doubling_capacities(most);
    Capabilities found{
        device.name,
        manifest.model.vocab_size,
        capacities,
        {256, 64, 16, 1},
        batch_sizes_up_to(options.max_batch_size),
        std::nullopt,
        manifest.trees(),
        weights == "w8a8" || (device.on_cpu() && (weights == "int4" || weights == "int8")),
        // tests/parity/test_same_entries.py: the CPU's kernels compute every row of a derived trunk alike.
        device.on_cpu() && manifest.derived_trunk(device.name, options.max_batch_size) != nullptr};
    if (device.on_cpu()) return found;
    found.chunk_capacities = wide_chunks(manifest.model, capacities);
    for (const auto& [width, limit] : found.chunk_capacities) {  // in rising order
        found.prefill_widths.insert(found.prefill_widths.begin(), width);
    }
    return found;
}

std::int64_t spare_entries_of(const Manifest& manifest, const LoadOptions& options, const Device& device) {
    const DerivedTrunk* derived = manifest.derived_trunk(device.name, options.max_batch_size);
    return derived == nullptr ? 0 : derived->spare_entries();
}

OrtBackend::Engine open_engine(const LoadOptions& options) {
    std::shared_ptr<const OrtLibrary> library = OrtLibrary::open(options.onnxruntime);
    Device device = choose_device(*library, options.device);
    register_plugin(*library, device, options);
    std::unique_ptr<Memory> memory = open_memory(device, options.allocator);
    return {std::move(library), std::move(device), std::move(memory)};
}

}  // namespace

OrtBackend::OrtBackend(std::filesystem::path bundle, const Manifest& manifest, const LoadOptions& options)
    : OrtBackend(std::move(bundle), manifest, options, open_engine(options)) {}

OrtBackend::OrtBackend(std::filesystem::path bundle, const Manifest& manifest, const LoadOptions& options,
                       Engine engine)
    : Backend(manifest, capabilities_of(manifest, options, engine.device), std::move(engine.memory),
              spare_entries_of(manifest, options, engine.device)),
      bundle_(std::move(bundle)),
      engine_(std::move(engine)) {
    // On other devices every tail has a copy of its own.
    if (engine_.device.on_cpu()) shared_ = std::make_unique<SharedTensors>(engine_.library, bundle_, manifest_);
    open_trunks(options);
    if (engine_.device.captures()) thread_ = std::make_unique<OneThread>([this] { return for_this_thread(); });
}

// Two graphs are open only if they share their weights in memory.
void OrtBackend::open_trunks(const LoadOptions& options) {
    const auto file_of = [&](bool lookahead_rows) {
        const DerivedTrunk* found =
            manifest_.derived_trunk(engine_.device.name, options.max_batch_size, lookahead_rows);
        return found == nullptr ? manifest_.trunk.file : found->file;
    };
    const std::string drafting = file_of(true), plain = file_of(false);
    trunk_ = open_packed(drafting, options);
    if (trunk_ != nullptr && plain != drafting) plain_trunk_ = open_packed(plain, options);
    if (trunk_ == nullptr) {
        trunk_ =
            std::make_unique<OrtGraph>(engine_.library, engine_.device, bundle_ / drafting, options.threads, nullptr);
    }
    note_capture(*trunk_);
    trunk_->check(manifest_.trunk, &manifest_);
    if (plain_trunk_ != nullptr) plain_trunk_->check(manifest_.trunk, &manifest_);
}

void OrtBackend::note_capture(const OrtGraph& graph) {
    if (!graph.not_captured().empty()) uncaptured_[graph.file()] = graph.not_captured();
}

// Null if no packed weights are kept for this trunk.
std::unique_ptr<OrtGraph> OrtBackend::open_packed(const std::string& file, const LoadOptions& options) const {
    if (!options.weight_cache || !engine_.device.on_cpu()) return nullptr;
    try {
        const auto path = packed_trunk(*engine_.library, bundle_, manifest_, file);
        if (!path) return nullptr;
        return std::make_unique<OrtGraph>(engine_.library, engine_.device, *path, options.threads, nullptr, true);
    } catch (const Error& error) {  // the entry was removed meanwhile
        log(LogLevel::info, file + ": weights are not mapped: " + error.what());
        return nullptr;
    }
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

void OrtBackend::run_trunk(const Plan& plan, int batch) {
    in_thread([&] {
        run_bound(bound_trunks_.get({plan.name, batch}, [&](int cuda_graph) {
            return bind_trunk(cuda_graph, plan, bindings_.trunk(plan, batch), 0, batch);
        }));
    });
}

void OrtBackend::run_prefill(int slot, const Plan& plan) {
    in_thread([&] {
        run_bound(bound_prefills_.get({plan.width(), slot}, [&](int cuda_graph) {
            return bind_trunk(cuda_graph, plan, bindings_.trunk(plan, 1, true), slot, 1);
        }));
    });
}

void OrtBackend::run_tail(const PassKind& kind) {
    in_thread([&] { run_tails(kind); });
}

Backend::PassResult OrtBackend::run_pass(const PassKind& kind) {
    PassResult found;
    in_thread([&] { found = Backend::run_pass(kind); });
    return found;
}

void OrtBackend::run_tails(const PassKind& kind) {
    const std::string& plan = kind.plan.name;
    if (kind.num_biased > 0) {
        run_bound(bound_tails_.get({plan, processors_graph, kind.batch, kind.num_biased}, [&](int cuda_graph) {
            return bind(cuda_graph, tail_graph(processors()),
                        bindings_.processors(processors(), kind.plan, kind.batch, kind.num_biased));
        }));
    }
    const bool processed = kind.num_biased > 0;
    run_bound(bound_tails_.get({plan, static_cast<int>(kind.sampler), kind.batch, processed}, [&](int cuda_graph) {
        return bind(cuda_graph, tail_graph(bindings_.tail_graph(kind.plan, kind.sampler)),
                    bindings_.tail(kind.plan, kind.sampler, kind.batch, processed));
    }));
    if (!kind.logprobs) return;
    run_bound(bound_tails_.get({plan, logprobs_graph, kind.batch, 0}, [&](int cuda_graph) {
        return bind(cuda_graph, tail_graph(manifest_.logprobs), bindings_.logprobs(kind.plan, kind.batch));
    }));
}

std::vector<BoundTensor> OrtBackend::placed(const std::vector<Binding>& bindings) {
    std::vector<BoundTensor> found;
    for (const Binding& one : bindings) found.push_back({one.tensor, one.dtype, one.shape, buffers_.at(one)});
    return found;
}

BoundGraph OrtBackend::bind(int cuda_graph, const OrtGraph& graph, const Bindings& bindings) {
    const std::vector<BoundTensor> inputs = placed(bindings.inputs), outputs = placed(bindings.outputs);
    return {graph, inputs, outputs, capture_of(cuda_graph, graph, in_place_inputs(inputs, outputs))};
}

Capture OrtBackend::capture_of(int cuda_graph, const OrtGraph& graph, std::vector<BoundTensor> in_place) {
    const auto failed = [this, file = graph.file()](const std::string& reason) { not_captured(file, reason); };
    return {cuda_graph, memory_.get(), std::move(in_place), failed};
}

// The log says so once for all plans, batches and slots that run the graph.
void OrtBackend::not_captured(const std::string& file, const std::string& reason) {
    if (!uncaptured_.contains(file)) {
        log(LogLevel::warning, file + " runs without a CUDA graph, and so more slowly: " + reason);
    }
    uncaptured_[file] = reason;
}

// Past and present are the same memory: without that, every pass would copy the cache.
BoundGraph OrtBackend::bind_trunk(int cuda_graph, const Plan& plan, const Bindings& bindings, int slot, int batch) {
    std::vector<BoundTensor> inputs = placed(bindings.inputs), outputs = placed(bindings.outputs);
    std::vector<BoundTensor> both = in_place_inputs(inputs, outputs);
    const std::array<std::int64_t, 4> shape = cache_.shape(batch);
    for (std::size_t i = 0; i < cache_.names().size(); ++i) {
        const std::string& past = cache_.names()[i];
        const std::string present = present_prefix + past.substr(std::strlen(cache_prefix));
        const std::vector<std::int64_t> sizes(shape.begin(), shape.end());
        inputs.push_back({past, cache_.dtype(), sizes, cache_.place(i, slot)});
        outputs.push_back({present, cache_.dtype(), sizes, cache_.place(i, slot)});
    }
    const bool plain = plan.lookahead_rows() == 0 && plain_trunk_ != nullptr;
    const OrtGraph& graph = plain ? *plain_trunk_ : *trunk_;
    return {graph, inputs, outputs, capture_of(cuda_graph, graph, std::move(both))};
}

// A tail runs on one thread: a second thread pool would spin on the cores that the trunk's next pass needs.
const OrtGraph& OrtBackend::tail_graph(const Graph& graph) {
    std::unique_ptr<OrtGraph>& tail = tails_[graph.file];
    if (tail == nullptr) {
        auto opened =
            std::make_unique<OrtGraph>(engine_.library, engine_.device, bundle_ / graph.file, 1, shared_.get());
        note_capture(*opened);
        opened->check(graph);
        tail = std::move(opened);
    }
    return *tail;
}

}  // namespace pass
