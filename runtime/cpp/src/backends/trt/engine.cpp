#include "backends/trt/engine.h"

#include <algorithm>

#include "backends/memory.h"
#include "errors.h"
#include "log.h"

namespace pass {

namespace {

std::string shape_text(const Shape& shape) {
    std::string text;
    for (std::int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
    return "(" + text + (shape.size() == 1 ? ",)" : ")");
}

}  // namespace

std::span<std::byte> TrtScratch::reserve(std::int64_t size) {
    const auto wanted = static_cast<std::size_t>(size);
    if (block_.data() == nullptr || wanted > block_.size()) block_ = {cuda_.allocate(wanted), wanted};
    return block_;
}

TrtEngine::TrtEngine(TrtApi& api, Cuda& cuda, TrtScratch& scratch, const std::filesystem::path& path,
                     const EngineFile& file)
    : api_(api), cuda_(cuda), path_(path.string()), file_(file) {
    const MappedFile bytes(path);
    api_.take_errors();
    plan_ = api.deserialize({bytes.data(), bytes.size()});
    if (plan_ == nullptr) {
        throw Error(path_ + " cannot be loaded on this GPU (deserializeCudaEngine: " + reason() +
                    "); if the file is the cause, build it again with pass-export build");
    }
    check();
    scratch_ = scratch.reserve(plan_->scratch_size());
}

// The engine's profiles and aliases must be those in the manifest.
void TrtEngine::check() const {
    if (static_cast<std::size_t>(plan_->profiles()) != file_.profiles.size()) {
        throw again("has " + std::to_string(plan_->profiles()) + " profiles and the manifest lists " +
                    std::to_string(file_.profiles.size()));
    }
    const auto found = plan_->aliases();
    if (found && *found != std::map<std::string, std::string>(file_.aliases.begin(), file_.aliases.end())) {
        throw again("does not update its KV cache in place as the manifest says");
    }
}

Error TrtEngine::again(const std::string& what) const {
    return Error(path_ + " " + what + "; build it again with pass-export build");
}

int TrtEngine::profile(const std::map<std::string, std::int64_t>& sizes) const {
    for (std::size_t i = 0; i < file_.profiles.size(); ++i) {
        if (file_.profiles[i].admits(sizes)) return static_cast<int>(i);
    }
    std::string text;
    for (const auto& [name, size] : sizes) text += (text.empty() ? "" : ", ") + name + " " + std::to_string(size);
    throw again("was not built for " + text);
}

Error TrtEngine::refusal(const std::string& what, const char* function) {
    return Error(path_ + " " + what + " (" + function + ": " + reason() + ")");
}

std::string TrtEngine::reason() {
    const std::string met = cuda_.why();  // throws if the device is lost
    std::string said = api_.take_errors();
    if (!met.empty()) said += (said.empty() ? "" : "; ") + met;
    return said.empty() ? "it gave no reason" : said;
}

void TrtEngine::enqueue(const TrtBinding& binding) {
    TrtContext& running = context(binding);
    api_.take_errors();
    if (!running.enqueue(cuda_.stream())) throw refusal("failed to run", "enqueueV3");
}

void TrtEngine::bind(TrtContext& context, const TrtBinding& binding) {
    const std::string profile = std::to_string(binding.profile);
    if (binding.profile != 0 && !context.set_profile(binding.profile, cuda_.stream())) {
        throw refusal("does not take profile " + profile, "setOptimizationProfileAsync");
    }
    cuda_.synchronize();
    for (const auto& [name, shape] : binding.shapes) {
        if (context.set_shape(name, shape)) continue;
        throw refusal("refuses shape " + shape_text(shape) + " for " + name + " in profile " + profile,
                      "setInputShape");
    }
    for (const auto& [name, address] : binding.addresses) {
        if (!context.set_address(name, address)) throw refusal("refuses the address of " + name, "setTensorAddress");
    }
}

TrtContext& TrtEngine::context(const TrtBinding& binding) {
    const auto known = contexts_.find(binding);
    if (known != contexts_.end()) return *known->second;
    api_.take_errors();
    std::unique_ptr<TrtContext> made = plan_->create_context();
    if (made == nullptr) throw refusal("gets no execution context", "createExecutionContext");
    made->set_scratch(scratch_.data(), static_cast<std::int64_t>(scratch_.size()));
    bind(*made, binding);
    return *contexts_.emplace(binding, std::move(made)).first->second;
}

void TrtProgram::run() {
    if (graph_ != nullptr) {
        cuda_.launch(graph_);
        cuda_.synchronize();
        return;
    }
    enqueue();
    cuda_.synchronize();
    runs_ += 1;
    if (runs_ == 2) capture();  // the first run with new shapes may do work that a capture does not allow
}

void TrtProgram::capture() {
    try {
        const auto capturable = [](auto& one) { return one.first->capturable(one.second); };
        if (!std::all_of(work_.begin(), work_.end(), capturable)) throw Error("isStreamCapturable says no");
        graph_ = cuda_.capture([this] { enqueue(); });
    } catch (const DeviceLost&) {
        throw;
    } catch (const Error& error) {
        uncaptured_[name_] = error.what();
        log(LogLevel::warning, name_ + " runs without a CUDA graph, and so more slowly: " + error.what());
    }
}

void TrtProgram::enqueue() {
    for (auto& [engine, binding] : work_) engine->enqueue(binding);
    for (const Copy& copy : copies_) cuda_.enqueue_download(copy.host, copy.address, copy.size);
}

}  // namespace pass
