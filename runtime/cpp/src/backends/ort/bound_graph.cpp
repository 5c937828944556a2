#include "backends/ort/bound_graph.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "errors.h"

namespace pass {

namespace {

constexpr int no_graph_id = -1;  // with this number ONNX Runtime neither captures nor replays

}  // namespace

std::size_t BoundTensor::size() const {
    std::size_t bytes = item_size(dtype);
    for (std::int64_t elements : shape) bytes *= static_cast<std::size_t>(elements);
    return bytes;
}

std::vector<BoundTensor> overwritten_inputs(const std::vector<BoundTensor>& inputs,
                                            const std::vector<BoundTensor>& outputs) {
    std::vector<BoundTensor> result;
    for (const BoundTensor& input : inputs) {
        const auto overwrites = [&](const BoundTensor& output) {
            return output.address == input.address;
        };
        if (std::any_of(outputs.begin(), outputs.end(), overwrites)) result.push_back(input);
    }
    return result;
}

int next_graph_id() {
    static std::atomic<int> next = 0;
    return ++next;
}

BoundGraph::BoundGraph(const OrtGraph& graph, const std::vector<BoundTensor>& inputs,
                       const std::vector<BoundTensor>& outputs, std::optional<Capture> capture)
    : graph_(&graph),
      binding_(graph.library().make(graph.library().api().CreateIoBinding,
                                    graph.library().api().ReleaseIoBinding, graph.session())),
      capture_(graph.captures() ? std::move(capture) : std::nullopt),
      options_(options_of(capture_ ? capture_->graph_id : no_graph_id)) {
    const OrtLibrary& library = graph.library();
    const OrtApi& api = library.api();
    const auto device_memory =
        library.make(api.CreateMemoryInfo, api.ReleaseMemoryInfo, graph.device().memory(),
                     OrtDeviceAllocator, graph.device().ordinal, OrtMemTypeDefault);
    const auto bind = [&](const std::vector<BoundTensor>& tensors, auto bind_one) {
        for (const BoundTensor& tensor : tensors) {
            values_.push_back(library.make(api.CreateTensorWithDataAsOrtValue, api.ReleaseValue,
                                           device_memory.get(), static_cast<void*>(tensor.address),
                                           tensor.size(), tensor.shape.data(), tensor.shape.size(),
                                           element_type(tensor.dtype)));
            library.check(bind_one(binding_.get(), tensor.name.c_str(), values_.back().get()));
        }
    };
    bind(inputs, api.BindInput);
    bind(outputs, api.BindOutput);
}

void BoundGraph::run() {
    if (capture_)
        run_and_capture();
    else
        run_bound();
    capture_.reset();
}

void BoundGraph::run_and_capture() {
    Memory& memory = *capture_->memory;
    std::vector<std::vector<std::byte>> saved;
    for (const BoundTensor& tensor : capture_->overwritten) {
        saved.emplace_back(tensor.size());
        memory.download(saved.back().data(), tensor.address, tensor.size());
    }
    const auto restore = [&] {
        for (std::size_t i = 0; i < saved.size(); ++i)
            memory.upload(capture_->overwritten[i].address, saved[i].data(), saved[i].size());
    };
    try {
        run_bound();
    } catch (const Error& error) {
        memory.check_device();  // throws DeviceLost if no other run can work
        options_ = options_of(no_graph_id);
        restore();
        run_bound();
        capture_->on_failure(error.what());
        return;
    }
    if (saved.empty()) return;  // no execution changed what the next one read
    restore();
    run_bound();
}

void BoundGraph::run_bound() const {
    const OrtLibrary& library = graph_->library();
    library.check(library.api().RunWithBinding(graph_->session(), options_.get(), binding_.get()),
                  "onnxruntime failed to run a pass");
}

Owned<OrtRunOptions> BoundGraph::options_of(int graph_id) const {
    const OrtLibrary& library = graph_->library();
    const OrtApi& api = library.api();
    Owned<OrtRunOptions> options = library.make(api.CreateRunOptions, api.ReleaseRunOptions);
    library.check(
        api.AddRunConfigEntry(options.get(), "gpu_graph_id", std::to_string(graph_id).c_str()));
    return options;
}

OneThread::OneThread(std::function<std::shared_ptr<void>()> context)
    : thread_([this, context = std::move(context)] {
          const std::shared_ptr<void> held = context();
          work();
      }) {}

OneThread::~OneThread() {
    {
        const std::lock_guard lock(mutex_);
        ending_ = true;
    }
    changed_.notify_one();
    thread_.join();
}

void OneThread::run(const std::function<void()>& task) {
    if (std::this_thread::get_id() == thread_.get_id()) {
        task();
        return;
    }
    std::packaged_task<void()> packaged([&task] { task(); });
    std::future<void> done = packaged.get_future();
    {
        const std::lock_guard lock(mutex_);
        tasks_.push_back(std::move(packaged));
    }
    changed_.notify_one();
    done.get();
}

void OneThread::work() {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return ending_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        std::packaged_task<void()> task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        task();
        lock.lock();
    }
}

}  // namespace pass
