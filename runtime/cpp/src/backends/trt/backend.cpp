#include "backends/trt/backend.h"

#include <algorithm>
#include <cstring>

#include "backends/capabilities.h"
#include "backends/trt/library.h"
#include "errors.h"
#include "log.h"

namespace pass {

namespace {

constexpr std::size_t staging_bytes = 4 << 20;          // bytes, of pinned memory for what is written between passes
constexpr const char* runtime_cache = "kernels.cache";  // beside the engines: see TrtApi::use_kernels

// The fewest window rows that the trunk's engine has a profile for.
int least_width(const EngineSet& engines) {
    std::int64_t least = 0;
    for (const EngineFile& engine : engines.engines) {
        for (const Profile& profile : engine.profiles) {
            const Profile::Range* width = nullptr;
            bool trunk = false;
            for (const auto& [name, range] : profile.sizes) {
                if (name == "width") width = &range;
                trunk = trunk || name == columns_input;
            }
            if (trunk && width != nullptr && (least == 0 || width->min < least)) least = width->min;
        }
    }
    return static_cast<int>(std::max<std::int64_t>(least, 1));
}

// What the engines were built for, limited by `options`.
Capabilities capabilities_of(const Manifest& manifest, const EngineSet& engines, const LoadOptions& options) {
    if (options.max_batch_size > engines.max_batch_size) {
        throw Error("the engines were built with --max-batch-size " + std::to_string(engines.max_batch_size) +
                    "; use that, or build them with --max-batch-size " + std::to_string(options.max_batch_size));
    }
    const std::int64_t built = engines.capacities.back(), most = options.capacity.value_or(built);
    if (most > built) {
        throw Error("the engines' KV capacity is " + std::to_string(built) + " tokens; use --capacity " +
                    std::to_string(built) + " or less, or build them with --max-seq-len " + std::to_string(most));
    }
    Capabilities found;
    found.device = engines.library + " " + engines.version;
    found.vocab_size = manifest.model.vocab_size;
    for (std::int64_t columns : engines.capacities) {
        if (columns < most) found.capacities.push_back(columns);
    }
    found.capacities.push_back(most);
    for (std::int64_t width : engines.prefill_widths) found.prefill_widths.push_back(static_cast<int>(width));
    found.prefill_widths.push_back(1);
    found.batch_sizes = batch_sizes_up_to(options.max_batch_size);
    found.lookahead = static_cast<int>(engines.lookahead);
    found.trees = manifest.trees([&](const std::string& graph) {
        return std::any_of(engines.engines.begin(), engines.engines.end(),
                           [&](const EngineFile& engine) { return engine.graph == graph; });
    });
    found.rounds_activations = manifest.model.weights == "w8a8";
    found.least_width = least_width(engines);
    found.listed = listed_positions(built);
    found.keeps_graphs = true;
    return found;
}

}  // namespace

TrtBackend::TrtBackend(std::filesystem::path bundle, const Manifest& manifest, const std::string& library,
                       const LoadOptions& options, std::unique_ptr<TrtApi> api, CudaApi cuda)
    : TrtBackend(bundle, manifest, options, [&] {
          const int ordinal = split_device(options.device).ordinal;
          const std::optional<Gpu> gpu = find_gpu(cuda, ordinal);
          const EngineSet& engines = choose_engines(bundle, manifest, library, api->version(), gpu, options.verify,
                                                    gpu ? "" : why_no_gpu(cuda));
          return Opened{engines, std::move(api), std::make_unique<Cuda>(cuda, ordinal, staging_bytes)};
      }()) {}

TrtBackend::TrtBackend(std::filesystem::path bundle, const Manifest& manifest, const LoadOptions& options,
                       Opened opened)
    : Backend(manifest, capabilities_of(manifest, opened.engines, options), std::move(opened.cuda)),
      bundle_(std::move(bundle)),
      set_(opened.engines),
      cuda_(static_cast<Cuda&>(*memory_)),
      api_(std::move(opened.api)) {
    const auto held = for_this_thread();
    api_->use_kernels(engine_directory(bundle_, set_) / runtime_cache);
    engine(manifest_.trunk);  // a trunk that cannot be loaded is refused now
}

TrtBackend::~TrtBackend() {
    if (cuda_.failure() != nullptr) return;
    try {
        const auto held = for_this_thread();
        api_->save_kernels();
    } catch (const std::exception& error) {
        log(LogLevel::info, std::string("compiled kernels are not kept: ") + error.what());
    }
}

// The KV cache is allocated at the largest capacity at once; `capacity` only limits how much of it passes read.
void TrtBackend::resize(std::int64_t capacity, std::span<const std::int64_t> lengths) {
    if (cache_.capacity() == 0) cache_.resize(set_.capacities.back(), lengths);
    capacity_ = capacity;
    columns_ = *std::lower_bound(set_.capacities.begin(), set_.capacities.end(), capacity);
}

void TrtBackend::run_trunk(const Plan& plan, int batch) {
    program(key_of(Graphs::trunk, {plan, batch}), [&] { return Work{{bind_trunk(plan, batch, 0, false)}}; }).run();
}

void TrtBackend::run_tail(const PassKind& kind) {
    program(key_of(Graphs::tail, kind), [&] { return Work{bind_tails(kind)}; }).run();
}

void TrtBackend::run_prefill(int slot, const Plan& plan) {
    program(key_of(Graphs::prefill, {plan, slot}), [&] { return Work{{bind_trunk(plan, 1, slot, true)}}; }).run();
}

Backend::PassResult TrtBackend::run_pass(const PassKind& kind) {
    const auto batch = static_cast<std::size_t>(kind.batch);
    const std::size_t all = batch * static_cast<std::size_t>(kind.plan.max_emitted());
    const std::size_t every_row = kind.plan.is_tree() ? all : 0;
    std::int64_t *count = result("count", batch), *emitted = result("emitted", all);
    std::int64_t* rows = every_row > 0 ? result("emitted_rows", every_row) : nullptr;
    program(key_of(Graphs::pass, kind), [&] {
        TrtProgram::Work work = bind_tails(kind);
        const std::map<std::string, std::byte*>& addresses = work.at(kind.num_biased > 0 ? 1 : 0).second.addresses;
        const auto copy = [&](std::int64_t* host, const char* tensor, std::size_t items) {
            return TrtProgram::Copy{reinterpret_cast<std::byte*>(host), addresses.at(tensor), items * sizeof(*host)};
        };
        std::vector<TrtProgram::Copy> copies{copy(count, "count", batch), copy(emitted, "emitted", all)};
        if (rows != nullptr) copies.push_back(copy(rows, "emitted_rows", every_row));
        work.insert(work.begin(), bind_trunk(kind.plan, kind.batch, 0, false));
        return Work{std::move(work), std::move(copies)};
    }).run();
    return {{count, count + batch}, {emitted, emitted + all}, {rows, rows + every_row}};
}

TrtBackend::Key TrtBackend::key_of(Graphs graphs, const PassKind& kind) {
    return {graphs, kind.plan.name, kind.batch, kind.sampler, kind.logprobs, kind.num_biased};
}

TrtProgram& TrtBackend::program(const Key& key, const std::function<Work()>& make) {
    const std::pair place(columns_, key);
    auto found = programs_.find(place);
    if (found == programs_.end()) {
        Work work = make();
        TrtProgram made(name_of(key), cuda_, uncaptured_, std::move(work.engines), std::move(work.copies));
        found = programs_.emplace(place, std::move(made)).first;
    }
    return found->second;
}

std::string TrtBackend::name_of(const Key& key) const {
    const auto& [graphs, plan, number, sampler, logprobs, num_biased] = key;
    const std::string processors =
        num_biased > 0 ? " with processors of " + std::to_string(num_biased) + " tokens" : "";
    const char *names[] = {"trunk", "tail", "pass", "prefill"}, *samplers[] = {"greedy", "sample", "truncated"};
    return std::string(names[static_cast<int>(graphs)]) + " " + plan + " " + std::to_string(number) + " " +
           samplers[static_cast<int>(sampler)] + (logprobs ? " with logprobs" : "") + processors + " over " +
           std::to_string(columns_) + " columns";
}

std::pair<TrtEngine*, TrtBinding> TrtBackend::bind_trunk(const Plan& plan, int batch, int slot, bool prefill) {
    TrtEngine& trunk = engine(manifest_.trunk);
    TrtBinding found = placed(bindings_.trunk(plan, batch, prefill));
    const Binding columns{columns_input, columns_input + ("." + std::to_string(columns_)), {columns_}, "bool", false,
                          nullptr};
    found.shapes[columns_input] = columns.shape;
    found.addresses[columns_input] = buffers_.at(columns);
    const auto shape = cache_.shape(batch);
    for (std::size_t i = 0; i < cache_.names().size(); ++i) {
        found.shapes[cache_.names()[i]] = Shape(shape.begin(), shape.end());
        found.addresses[cache_.names()[i]] = cache_.place(i, slot);
    }
    for (const auto& [output, source] : trunk.aliases()) found.addresses[output] = found.addresses.at(source);
    const auto adapted = found.shapes.find("lookahead_rows");
    found.profile = trunk.profile({{"batch", batch},
                                   {"width", found.shapes.at("input_ids")[1]},
                                   {"logit_rows", found.shapes.at("logit_rows")[0]},
                                   {"lookahead_rows", adapted == found.shapes.end() ? 0 : adapted->second[0]},
                                   {columns_input, columns_}});
    return {&trunk, std::move(found)};
}

TrtProgram::Work TrtBackend::bind_tails(const PassKind& kind) {
    TrtProgram::Work work;
    if (kind.num_biased > 0) {
        work.push_back(
            bind_tail(kind, processors(), bindings_.processors(processors(), kind.plan, kind.batch, kind.num_biased)));
    }
    work.push_back(bind_tail(kind, bindings_.tail_graph(kind.plan, kind.sampler),
                             bindings_.tail(kind.plan, kind.sampler, kind.batch, kind.num_biased > 0)));
    if (kind.logprobs) {
        work.push_back(bind_tail(kind, manifest_.logprobs, bindings_.logprobs(kind.plan, kind.batch)));
    }
    return work;
}

std::pair<TrtEngine*, TrtBinding> TrtBackend::bind_tail(const PassKind& kind, const Graph& graph,
                                                        const Bindings& bindings) {
    TrtEngine& tail = engine(graph);
    TrtBinding found = placed(bindings);
    found.profile = tail.profile({{"batch", kind.batch},
                                  {"width", kind.plan.width()},
                                  {"lookahead_rows", kind.plan.lookahead_rows()},
                                  {"positions", capabilities_.positions()},
                                  {"max_emitted", kind.plan.max_emitted()},
                                  {"processed_rows", kind.plan.drafts + 1},
                                  {"touched", static_cast<std::int64_t>(kind.num_biased)}});
    return {&tail, std::move(found)};
}

TrtBinding TrtBackend::placed(const Bindings& bindings) {
    TrtBinding found;
    for (const Binding& input : bindings.inputs) {
        found.shapes[input.tensor] = input.shape;
        found.addresses[input.tensor] = buffers_.at(input);
    }
    for (const Binding& output : bindings.outputs) found.addresses[output.tensor] = buffers_.at(output);
    return found;
}

std::int64_t* TrtBackend::result(const std::string& name, std::size_t count) {
    std::int64_t*& memory = results_[{name, count}];
    if (memory == nullptr) memory = reinterpret_cast<std::int64_t*>(cuda_.pinned(count * sizeof(std::int64_t)));
    return memory;
}

TrtEngine& TrtBackend::engine(const Graph& graph) {
    const auto known = engines_.find(graph.file);
    if (known != engines_.end()) return *known->second;
    const auto file = std::find_if(set_.engines.begin(), set_.engines.end(),
                                   [&](const EngineFile& one) { return one.graph == graph.file; });
    if (file == set_.engines.end()) {
        throw Error(set_.directory + " has no engine of " + graph.file + "; build the engines again");
    }
    const std::filesystem::path path = engine_directory(bundle_, set_) / file->file;
    return *engines_.emplace(graph.file, std::make_unique<TrtEngine>(*api_, cuda_, scratch_, path, *file))
                .first->second;
}

std::string find_engines(const Manifest& manifest, const LoadOptions& options) {
    if (manifest.engines.empty()) return "";
    std::optional<Gpu> gpu;
    try {
        gpu = find_gpu(CudaApi::open(), split_device(options.device).ordinal);
    } catch (const Error&) {
    }
    if (!gpu) return "";
    for (const TrtLibrary& library : trt_libraries()) {
        std::string version;
        for (const EngineSet& engines : manifest.engines) {
            if (engines.library != library.name) continue;
            try {
                if (version.empty()) version = open_trt(library, options.tensorrt)->version();
            } catch (const Error&) {  // the library is missing or unusable, so its engines cannot run
                break;
            }
            const std::string why = why_not(engines, manifest, version, *gpu);
            if (why.empty()) return library.name;
            log(LogLevel::info, "device auto: the " + engines.library + " engines " + why);
        }
    }
    return "";
}

std::unique_ptr<Backend> open_trt_backend(const std::filesystem::path& bundle, const Manifest& manifest,
                                          const std::string& library, const LoadOptions& options) {
    std::unique_ptr<TrtApi> api = open_trt(*find_trt_library(library), options.tensorrt);
    return std::make_unique<TrtBackend>(bundle, manifest, library, options, std::move(api), CudaApi::open());
}

}  // namespace pass
