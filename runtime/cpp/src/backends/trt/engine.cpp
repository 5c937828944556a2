#include "backends/trt/engine.h"

#include <algorithm>

#include "backends/mapped_file.h"
#include "errors.h"

namespace pass {

namespace {

std::string shape_text(const Shape& shape) {
    std::string text;
    for (std::int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
    return "(" + text + (shape.size() == 1 ? ",)" : ")");
}

}  // namespace

TrtEngine::TrtEngine(TrtApi& api, Cuda& cuda, const std::filesystem::path& path, const EngineFile& file)
    : cuda_(cuda), path_(path.string()), file_(file) {
    const MappedFile bytes(path);
    plan_ = api.deserialize({bytes.data(), bytes.size()});
    if (plan_ == nullptr) throw again("cannot be loaded on this GPU");
    check();
    scratch_ = cuda_.allocate(static_cast<std::size_t>(plan_->scratch_size()));
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

void TrtEngine::enqueue(const TrtBinding& binding) {
    TrtContext& running = context(binding.profile);
    const auto known = bound_.find(binding.profile);
    if (known == bound_.end() || known->second != binding) {
        bound_.erase(binding.profile);  // until it is set completely
        bind(running, binding);
        bound_[binding.profile] = binding;
    }
    if (running.enqueue(cuda_.stream())) return;
    cuda_.check_device();
    throw Error(path_ + " failed to run; the GPU may be out of memory");
}

void TrtEngine::bind(TrtContext& context, const TrtBinding& binding) {
    for (const auto& [name, shape] : binding.shapes) {
        if (context.set_shape(name, shape)) continue;
        throw Error(path_ + " refuses shape " + shape_text(shape) + " for " + name + " in profile " +
                    std::to_string(binding.profile));
    }
    for (const auto& [name, address] : binding.addresses) {
        if (!context.set_address(name, address)) throw Error(path_ + " has no tensor " + name);
    }
}

TrtContext& TrtEngine::context(int profile) {
    const auto known = contexts_.find(profile);
    if (known != contexts_.end()) return *known->second;
    std::unique_ptr<TrtContext> made = plan_->create_context();
    if (made == nullptr) throw Error("the GPU has no memory left for " + path_ + "; stop other programs on it");
    made->set_scratch(scratch_, plan_->scratch_size());
    if (profile != 0 && !made->set_profile(profile, cuda_.stream())) {
        throw Error(path_ + " has no profile " + std::to_string(profile));
    }
    cuda_.synchronize();
    return *contexts_.emplace(profile, std::move(made)).first->second;
}

void TrtProgram::run() {
    if (graph_ != nullptr) {
        cuda_.launch(graph_);
        cuda_.synchronize();
        return;
    }
    enqueue();
    cuda_.synchronize();
    // Captured only after a run: the first run with new shapes may do work that a capture does not allow.
    const auto capturable = [](auto& one) { return one.first->capturable(one.second); };
    if (repeated_ && std::all_of(work_.begin(), work_.end(), capturable)) {
        graph_ = cuda_.capture([this] { enqueue(); });
    }
    repeated_ = true;
}

void TrtProgram::enqueue() {
    for (auto& [engine, binding] : work_) engine->enqueue(binding);
    for (const Copy& copy : copies_) cuda_.enqueue_download(copy.host, copy.address, copy.size);
}

}  // namespace pass
