#include "backends/trt/engine.h"

#include "backends/memory.h"
#include "errors.h"
#include "log.h"

namespace pass {

namespace {

// The shape as Python writes a tuple.
std::string shape_text(const Shape& shape) {
    std::string text;
    for (const std::int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
    return "(" + text + (shape.size() == 1 ? ",)" : ")");
}

}  // namespace

TrtEngine::TrtEngine(TrtApi& api, Cuda& cuda, std::span<std::byte>& scratch, const OpenFiles& files,
                     const EngineFile& file)
    : api_(api), cuda_(cuda), path_(files.path(file.file).string()), file_(file) {
    const MappedFile& bytes = *files.data().at(file.file);
    api_.take_errors();
    engine_ = api.deserialize({bytes.data(), bytes.size()});
    if (engine_ == nullptr) {
        throw Error(path_ + " cannot be loaded on this GPU (deserializeCudaEngine: " + reason() +
                    "); if the file is the cause, build it again with pass-export build");
    }
    const auto size = static_cast<std::size_t>(engine_->scratch_size());
    if (scratch.data() == nullptr || size > scratch.size()) scratch = {cuda.allocate(size), size};
    scratch_ = scratch;
}

int TrtEngine::profile(const std::map<std::string, std::int64_t>& sizes) const {
    for (std::size_t i = 0; i < file_.profiles.size(); ++i) {
        if (file_.profiles[i].admits(sizes)) return static_cast<int>(i);
    }
    std::string text;
    for (const auto& [name, size] : sizes)
        text += (text.empty() ? "" : ", ") + name + " " + std::to_string(size);
    throw Error(path_ + " was not built for " + text + "; build it again with pass-export build");
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
