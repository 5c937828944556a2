#include "backends/trt/engine.h"

#include <algorithm>

#include "backends/memory.h"
#include "errors.h"
#include "log.h"

namespace pass {

namespace {

// The shape as Python writes a tuple.
std::string shape_text(const std::vector<Dimension>& shape) {
    std::string text;
    for (const Dimension& size : shape) {
        const auto* name = std::get_if<std::string>(&size);
        text += text.empty() ? "" : ", ";
        text += name != nullptr ? "'" + *name + "'" : std::to_string(std::get<std::int64_t>(size));
    }
    return "(" + text + (shape.size() == 1 ? ",)" : ")");
}

std::string shape_text(const Shape& shape) {
    return shape_text(std::vector<Dimension>(shape.begin(), shape.end()));
}

// Whether the ranks are equal and no static size differs. In `built`, a dynamic size is -1.
bool matches(const Shape& built, const std::vector<Dimension>& listed) {
    return std::equal(built.begin(), built.end(), listed.begin(), listed.end(),
                      [](std::int64_t built_size, const Dimension& size) {
                          return built_size == -1 || std::holds_alternative<std::string>(size) ||
                                 Dimension(built_size) == size;
                      });
}

}  // namespace

EngineShapes engine_shapes(const Graph& graph, std::int64_t capacity, int least_width, bool trunk) {
    EngineShapes shapes;
    if (trunk) shapes[columns_input] = {columns_input};
    for (const std::vector<Tensor>* tensors : {&graph.inputs, &graph.outputs}) {
        for (const Tensor& tensor : *tensors) {
            const bool is_window = tensor.name == "input_ids" || tensor.name == "next_ids";
            const std::int64_t min_size = is_window ? least_width : 0;
            std::vector<Dimension>& shape = shapes[tensor.name] = tensor.shape;
            for (Dimension& size : shape) {
                if (size == Dimension("capacity")) size = capacity;
                if (auto* number = std::get_if<std::int64_t>(&size))
                    *number = std::max(*number, min_size);
            }
        }
    }
    return shapes;
}

std::span<std::byte> TrtScratch::reserve(std::int64_t size) {
    const auto needed = static_cast<std::size_t>(size);
    if (block_.data() == nullptr || needed > block_.size())
        block_ = {cuda_.allocate(needed), needed};
    return block_;
}

TrtEngine::TrtEngine(TrtApi& api, Cuda& cuda, TrtScratch& scratch, const OpenFiles& files,
                     const EngineFile& file, const EngineShapes& shapes)
    : api_(api), cuda_(cuda), path_(files.path(file.file).string()), file_(file) {
    const MappedFile& bytes = *files.data().at(file.file);
    api_.take_errors();
    engine_ = api.deserialize({bytes.data(), bytes.size()});
    if (engine_ == nullptr) {
        throw Error(path_ + " cannot be loaded on this GPU (deserializeCudaEngine: " + reason() +
                    "); if the file is the cause, build it again with pass-export build");
    }
    check(shapes);
    scratch_ = scratch.reserve(engine_->scratch_size());
}

void TrtEngine::check(const EngineShapes& shapes) const {
    if (static_cast<std::size_t>(engine_->profiles()) != file_.profiles.size()) {
        throw outdated("has " + std::to_string(engine_->profiles()) +
                       " profiles and the manifest lists " + std::to_string(file_.profiles.size()));
    }
    const std::map<std::string, Shape> built = engine_->shapes();
    EngineShapes all_names = shapes;
    for (const auto& [name, shape] : built) all_names.try_emplace(name);
    for (const auto& [name, shape] : all_names) {
        const auto loaded = built.find(name);
        const auto listed = shapes.find(name);
        if (loaded != built.end() && listed != shapes.end() &&
            matches(loaded->second, listed->second))
            continue;
        throw outdated("and the manifest differ in the shape of " + name + ": " +
                       (loaded == built.end() ? "missing" : shape_text(loaded->second)) + " and " +
                       (listed == shapes.end() ? "missing" : shape_text(listed->second)));
    }
    const auto aliases = engine_->aliases();
    if (aliases && *aliases != std::map<std::string, std::string>(file_.aliases.begin(),
                                                                  file_.aliases.end())) {
        throw outdated("does not update its KV cache in place as the manifest says");
    }
}

Error TrtEngine::outdated(const std::string& what) const {
    return Error(path_ + " " + what + "; build it again with pass-export build");
}

int TrtEngine::profile(const std::map<std::string, std::int64_t>& sizes) const {
    for (std::size_t i = 0; i < file_.profiles.size(); ++i) {
        if (file_.profiles[i].admits(sizes)) return static_cast<int>(i);
    }
    std::string text;
    for (const auto& [name, size] : sizes)
        text += (text.empty() ? "" : ", ") + name + " " + std::to_string(size);
    throw outdated("was not built for " + text);
}

Error TrtEngine::refusal(const std::string& what, const char* function) {
    return Error(path_ + " " + what + " (" + function + ": " + reason() + ")");
}

std::string TrtEngine::reason() {
    const std::string cuda_error = cuda_.why();
    std::string errors = api_.take_errors();
    if (!cuda_error.empty()) errors += (errors.empty() ? "" : "; ") + cuda_error;
    return errors.empty() ? "it gave no reason" : errors;
}

void TrtEngine::enqueue(const EngineCall& call) {
    TrtContext& bound = context(call);
    api_.take_errors();  // so that `refusal` has the errors of this run alone
    if (!bound.enqueue(cuda_.stream())) throw refusal("failed to run", "enqueueV3");
}

void TrtEngine::bind(TrtContext& context, const EngineCall& call) {
    const std::string profile = std::to_string(call.profile);  // a new context has profile 0
    if (call.profile != 0 && !context.set_profile(call.profile, cuda_.stream()))
        throw refusal("does not take profile " + profile, "setOptimizationProfileAsync");
    cuda_.synchronize();  // The profile must be set before the shapes.
    for (const auto& [name, shape] : call.shapes) {
        if (context.set_shape(name, shape)) continue;
        throw refusal(
            "refuses shape " + shape_text(shape) + " for " + name + " in profile " + profile,
            "setInputShape");
    }
    for (const auto& [name, address] : call.addresses) {
        if (!context.set_address(name, address))
            throw refusal("refuses the address of " + name, "setTensorAddress");
    }
}

TrtContext& TrtEngine::context(const EngineCall& call) {
    const auto bound = contexts_.find(call);
    if (bound != contexts_.end()) return *bound->second;
    api_.take_errors();
    std::unique_ptr<TrtContext> created = engine_->create_context();
    if (created == nullptr) throw refusal("gets no execution context", "createExecutionContext");
    created->set_scratch(scratch_.data(), static_cast<std::int64_t>(scratch_.size()));
    bind(*created, call);
    return *contexts_.emplace(call, std::move(created)).first->second;
}

void TrtProgram::run() {
    if (graph_ != nullptr)
        cuda_.launch(graph_);
    else
        enqueue();
    cuda_.synchronize();
    // The first run with new shapes may do work that a capture does not allow.
    if (graph_ == nullptr && ++runs_ == 2) capture();
}

void TrtProgram::capture() {
    try {
        const auto capturable = [](Call& call) { return call.first->capturable(call.second); };
        if (!std::all_of(work_.calls.begin(), work_.calls.end(), capturable))
            throw Error("isStreamCapturable says no");
        graph_ = cuda_.capture([this] { enqueue(); });
    } catch (const DeviceLost&) {
        throw;
    } catch (const Error& error) {
        uncaptured_[name_] = error.what();
        log(LogLevel::warning,
            name_ + " runs without a CUDA graph, and so more slowly: " + error.what());
    }
}

void TrtProgram::enqueue() {
    for (auto& [engine, call] : work_.calls) engine->enqueue(call);
    for (const Copy& copy : work_.copies)
        cuda_.enqueue_download(copy.host, copy.address, copy.size);
}

}  // namespace pass
