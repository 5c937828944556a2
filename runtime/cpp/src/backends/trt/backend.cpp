#include "backends/trt/backend.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "backends/capabilities.h"
#include "backends/trt/library.h"
#include "errors.h"
#include "log.h"

namespace pass {

namespace {

constexpr std::size_t staging_bytes = 4 << 20;  // for windows, noise and the like

// The rows of the narrowest window that the trunk's engine has a profile for; 1 if it has none.
int least_width(const EngineSet& engines) {
    std::optional<std::int64_t> least;
    for (const EngineFile& engine : engines.engines) {
        for (const Profile& profile : engine.profiles) {
            // Of all graphs, only the trunk has the input `columns`.
            if (!profile.sizes.contains(columns_input)) continue;
            const std::int64_t rows = profile.sizes.at("width").min;
            least = std::min(least.value_or(rows), rows);
        }
    }
    return static_cast<int>(std::max<std::int64_t>(least.value_or(1), 1));
}

// What the engines were built for, limited by `options`. Throws Error if the options exceed it.
Capabilities capabilities_of(const Manifest& manifest, const EngineSet& engines,
                             const LoadOptions& options) {
    if (options.max_batch_size > engines.max_batch_size) {
        throw Error("the engines were built with --max-batch-size " +
                    std::to_string(engines.max_batch_size) +
                    "; use that, or build them with --max-batch-size " +
                    std::to_string(options.max_batch_size));
    }
    const std::int64_t built_for = engines.capacities.back(),
                       max_capacity = options.capacity.value_or(built_for);
    if (max_capacity > built_for) {
        throw Error("the engines' KV capacity is " + std::to_string(built_for) +
                    " tokens; use --capacity " + std::to_string(built_for) +
                    " or less, or build them with --max-seq-len " + std::to_string(max_capacity));
    }
    Capabilities result;
    result.device = engines.library + " " + engines.version;
    result.vocab_size = manifest.model.vocab_size;
    for (std::int64_t columns : engines.capacities) {
        if (columns < max_capacity) result.capacities.push_back(columns);
    }
    result.capacities.push_back(max_capacity);
    for (std::int64_t width : engines.prefill_widths)
        result.prefill_widths.push_back(static_cast<int>(width));
    result.prefill_widths.push_back(1);
    result.batch_sizes = batch_sizes_up_to(options.max_batch_size);
    result.fixed_lookahead = static_cast<int>(engines.lookahead);
    result.least_width = least_width(engines);
    result.engine_positions = listed_positions(built_for);
    result.keeps_graphs = true;
    result.verifying = verifying_windows(manifest, *result.fixed_lookahead);
    return result;
}

OpenFiles open_engines(const std::filesystem::path& directory, const EngineSet& engines) {
    std::set<std::string> names;
    for (const EngineFile& engine : engines.engines) names.insert(engine.file);
    return {directory, names};
}

}  // namespace

TrtBackend::TrtBackend(const std::filesystem::path& bundle, const Manifest& manifest,
                       const LoadOptions& options, std::unique_ptr<TrtApi> api, CudaApi cuda)
    : TrtBackend(bundle, manifest, options, [&] {
          const int ordinal = split_device(options.device).ordinal;
          const std::optional<Gpu> gpu = find_gpu(cuda, ordinal);
          const EngineSet& engines = choose_engines(bundle, manifest, api->version(), gpu,
                                                    options.verify, gpu ? "" : why_no_gpu(cuda));
          return Opened{engines, std::move(api),
                        std::make_unique<Cuda>(cuda, ordinal, staging_bytes)};
      }()) {}

TrtBackend::TrtBackend(const std::filesystem::path& bundle, const Manifest& manifest,
                       const LoadOptions& options, Opened opened)
    : Backend(manifest, capabilities_of(manifest, opened.engines, options), std::move(opened.cuda),
              open_engines(engine_directory(bundle, opened.engines), opened.engines)),
      engine_set_(opened.engines),
      cuda_(static_cast<Cuda&>(*memory_)),
      api_(std::move(opened.api)) {
    const auto held = for_this_thread();
    engine(manifest_.trunk);  // An engine that cannot be loaded is refused now.
}

// Changes how many entries a pass reads. The cache is allocated for the engines' largest capacity.
void TrtBackend::resize(std::int64_t capacity, std::span<const std::int64_t> lengths) {
    if (cache_.capacity() == 0) cache_.resize(engine_set_.capacities.back(), lengths);
    capacity_ = capacity;
    columns_ =
        *std::lower_bound(engine_set_.capacities.begin(), engine_set_.capacities.end(), capacity);
}

void TrtBackend::run_trunk(const Window& window, int batch) {
    program(key_of(Graphs::trunk, {window, batch}), [&] {
        return TrtProgram::Work{{bind_trunk(window, batch, 0, false)}};
    }).run();
}

void TrtBackend::run_tail(const PassKind& kind) {
    program(key_of(Graphs::tail, kind), [&] { return TrtProgram::Work{bind_tails(kind)}; }).run();
}

void TrtBackend::run_prefill(int slot, const Window& window) {
    program(key_of(Graphs::prefill, {window, slot}), [&] {
        return TrtProgram::Work{{bind_trunk(window, 1, slot, true)}};
    }).run();
}

Backend::PassResult TrtBackend::run_pass(const PassKind& kind) {
    const auto batch = static_cast<std::size_t>(kind.batch);
    const std::size_t num_emitted = batch * static_cast<std::size_t>(kind.window.max_emitted());
    std::int64_t *count = result("count", batch), *emitted = result("emitted", num_emitted);
    program(key_of(Graphs::pass, kind), [&] {
        std::vector<TrtProgram::Call> calls = bind_tails(kind);
        // The tail's call; the logits processors run before it, if at all.
        const EngineCall& tail = calls.at(kind.touched_count > 0 ? 1 : 0).second;
        const auto copy = [&](std::int64_t* host, const char* tensor, std::size_t items) {
            return TrtProgram::Copy{reinterpret_cast<std::byte*>(host), tail.addresses.at(tensor),
                                    items * sizeof(*host)};
        };
        std::vector<TrtProgram::Copy> copies{copy(count, "count", batch),
                                             copy(emitted, "emitted", num_emitted)};
        calls.insert(calls.begin(), bind_trunk(kind.window, kind.batch, 0, false));
        return TrtProgram::Work{std::move(calls), std::move(copies)};
    }).run();
    return {{count, count + batch}, {emitted, emitted + num_emitted}};
}

TrtBackend::Key TrtBackend::key_of(Graphs graphs, const PassKind& kind) {
    return {graphs, kind.window.name, kind.batch, kind.sampler, kind.logprobs, kind.touched_count};
}

TrtProgram& TrtBackend::program(const Key& key,
                                const std::function<TrtProgram::Work()>& make_work) {
    const std::pair full_key(columns_, key);
    auto entry = programs_.find(full_key);
    if (entry == programs_.end()) {
        TrtProgram new_program(name_of(key), cuda_, uncaptured_, make_work());
        entry = programs_.emplace(full_key, std::move(new_program)).first;
    }
    return entry->second;
}

std::string TrtBackend::name_of(const Key& key) const {
    const auto& [graphs, window, number, sampler, logprobs, touched_count] = key;
    const char* names[] = {"trunk", "tail", "pass", "prefill"};  // of `Graphs`
    std::string name = names[static_cast<int>(graphs)];
    name += " " + window + " " + std::to_string(number) + " " + pass::name_of(sampler);
    if (logprobs) name += " with logprobs";
    if (touched_count > 0)
        name += " with processors of " + std::to_string(touched_count) + " tokens";
    return name + " over " + std::to_string(columns_) + " columns";
}

TrtProgram::Call TrtBackend::bind_trunk(const Window& window, int batch, int slot, bool prefill) {
    TrtEngine& trunk = engine(manifest_.trunk);
    EngineCall call = call_of(bindings_.trunk(window, batch, prefill));
    const Binding columns{.tensor = columns_input,
                          .buffer = columns_input + ("." + std::to_string(columns_)),
                          .shape = {columns_},
                          .dtype = "bool",
                          .by_slot = false,
                          .constant = nullptr};
    call.shapes[columns_input] = columns.shape;
    call.addresses[columns_input] = buffers_.address_of(columns);
    const auto shape = cache_.shape(batch);
    for (std::size_t i = 0; i < cache_.names().size(); ++i) {
        call.shapes[cache_.names()[i]] = Shape(shape.begin(), shape.end());
        call.addresses[cache_.names()[i]] = cache_.address(i, slot);
    }
    for (const auto& [output, source] : trunk.aliases())
        call.addresses[output] = call.addresses.at(source);
    const auto lookahead_rows = call.shapes.find("lookahead_rows");
    call.profile = trunk.profile(
        {{"batch", batch},
         {"width", call.shapes.at("input_ids")[1]},
         {"logit_rows", call.shapes.at("logit_rows")[0]},
         {"lookahead_rows", lookahead_rows == call.shapes.end() ? 0 : lookahead_rows->second[0]},
         {columns_input, columns_}});
    return {&trunk, std::move(call)};
}

std::vector<TrtProgram::Call> TrtBackend::bind_tails(const PassKind& kind) {
    std::vector<TrtProgram::Call> calls;
    if (kind.touched_count > 0) {
        calls.push_back(
            bind_tail(kind, manifest_.processors,
                      bindings_.processors(kind.window, kind.batch, kind.touched_count)));
    }
    calls.push_back(
        bind_tail(kind, bindings_.tail_graph(kind.window, kind.sampler),
                  bindings_.tail(kind.window, kind.sampler, kind.batch, kind.touched_count > 0)));
    if (kind.logprobs) {
        calls.push_back(
            bind_tail(kind, manifest_.logprobs, bindings_.logprobs(kind.window, kind.batch)));
    }
    return calls;
}

TrtProgram::Call TrtBackend::bind_tail(const PassKind& kind, const Graph& graph,
                                       const Bindings& bindings) {
    TrtEngine& tail = engine(graph);
    EngineCall call = call_of(bindings);
    call.profile = tail.profile({{"batch", kind.batch},
                                 {"width", kind.window.width()},
                                 {"lookahead_rows", kind.window.lookahead_rows()},
                                 {"positions", capabilities_.noise_positions()},
                                 {"max_emitted", kind.window.max_emitted()},
                                 {"processed_rows", kind.window.drafts + 1},
                                 {"touched", static_cast<std::int64_t>(kind.touched_count)}});
    return {&tail, std::move(call)};
}

EngineCall TrtBackend::call_of(const Bindings& bindings) {
    EngineCall call;
    for (const Binding& input : bindings.inputs) {
        call.shapes[input.tensor] = input.shape;
        call.addresses[input.tensor] = buffers_.address_of(input);
    }
    for (const Binding& output : bindings.outputs)
        call.addresses[output.tensor] = buffers_.address_of(output);
    return call;
}

std::int64_t* TrtBackend::result(const std::string& name, std::size_t count) {
    std::int64_t*& memory = results_[{name, count}];
    if (memory == nullptr)
        memory = reinterpret_cast<std::int64_t*>(cuda_.pinned(count * sizeof(std::int64_t)));
    return memory;
}

TrtEngine& TrtBackend::engine(const Graph& graph) {
    std::unique_ptr<TrtEngine>& loaded = engines_[graph.file];
    if (loaded != nullptr) return *loaded;
    const auto file =
        std::find_if(engine_set_.engines.begin(), engine_set_.engines.end(),
                     [&](const EngineFile& each) { return each.graph == graph.file; });
    if (file == engine_set_.engines.end()) {
        throw Error(engine_set_.directory + " has no engine of " + graph.file +
                    "; build the engines again");
    }
    loaded = std::make_unique<TrtEngine>(*api_, cuda_, scratch_, files_, *file);
    return *loaded;
}

bool has_fitting_engines(const Manifest& manifest, const LoadOptions& options) {
    std::optional<Gpu> gpu;
    std::string version;
    for (const EngineSet& engines : manifest.engines) {
        if (engines.library != tensorrt) continue;
        try {
            if (!gpu) gpu = find_gpu(CudaApi::open(), split_device(options.device).ordinal);
            if (!gpu) return false;
            if (version.empty()) version = open_tensorrt(options.tensorrt)->version();
        } catch (const Error&) {  // there is no CUDA, no such GPU, or no usable library
            return false;
        }
        const std::string why = why_not(engines, manifest, version, *gpu);
        if (why.empty()) return true;
        log(LogLevel::info, "device auto: the " + engines.library + " engines " + why);
    }
    return false;
}

}  // namespace pass
