// Binds graphs to memory, and lets ONNX Runtime capture them as CUDA graphs.
//
// With `enable_cuda_graph`, the first run with a new graph number executes the graph three times:
// twice before the capture, and once from it. A tail overwrites the window that it reads, and would
// advance three times. So the inputs that a graph overwrites are saved before its first run and
// restored after it, and the graph is run again.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/memory.h"
#include "backends/ort/library.h"
#include "backends/ort/session.h"

namespace pass {

struct BoundTensor {
    std::string name;
    std::string dtype;
    std::vector<std::int64_t> shape;
    std::byte* address;

    std::size_t size() const;  // in bytes
};

struct Capture {
    int graph_id;
    Memory* memory;
    // Inputs that an output overwrites, but not the KV cache, where every run writes the same.
    std::vector<BoundTensor> overwritten;
    std::function<void(const std::string&)> on_failure;
};

std::vector<BoundTensor> overwritten_inputs(const std::vector<BoundTensor>& inputs,
                                            const std::vector<BoundTensor>& outputs);

// A number that no CUDA graph has yet.
int next_graph_id();

class BoundGraph {
   public:
    // capture: ignored if the device does not capture.
    BoundGraph(const OrtGraph& graph, const std::vector<BoundTensor>& inputs,
               const std::vector<BoundTensor>& outputs,
               std::optional<Capture> capture = std::nullopt);
    // Throws Error if ONNX Runtime fails, as when memory runs out.
    void run();

   private:
    // Run for the first time, with a capture. If that fails, run without, now and later.
    void run_and_capture();
    void run_bound() const;
    Owned<OrtRunOptions> options_of(int graph_id) const;

    const OrtGraph* graph_;
    std::vector<Owned<OrtValue>> values_;
    Owned<OrtIoBinding> binding_;
    std::optional<Capture> capture_;  // until the first run
    Owned<OrtRunOptions> options_;
};

// Bound graphs by key: if there are too many, all are bound again when they are used. ONNX Runtime
// keeps every CUDA graph that it captured, so a graph that is bound to the same addresses again
// gets its old graph number.
template <class Key>
class BoundGraphs {
   public:
    // If it is not kept, `make(graph_id)` makes it.
    template <class Make>
    BoundGraph& get(const Key& key, const Make& make) {
        auto entry = bound_.find(key);
        if (entry == bound_.end()) {
            int& graph_id = graph_ids_[key];
            if (graph_id == 0) graph_id = next_graph_id();
            BoundGraph graph = make(graph_id);
            if (bound_.size() == max_bound_graphs) bound_.clear();
            entry = bound_.emplace(key, std::move(graph)).first;
        }
        return entry->second;
    }

    // Call it when addresses have changed.
    void clear() {
        bound_.clear();
        graph_ids_.clear();
    }

   private:
    static constexpr std::size_t max_bound_graphs = 256;

    std::map<Key, BoundGraph> bound_;
    std::map<Key, int> graph_ids_;
};

// Runs tasks in its own thread, because captured graphs belong to the thread that captured them.
// The thread ends with this object, after the tasks in its queue.
class OneThread {
   public:
    // context: makes an object that the thread holds until it ends (`Memory::for_this_thread`).
    explicit OneThread(std::function<std::shared_ptr<void>()> context);
    ~OneThread();
    OneThread(const OneThread&) = delete;
    OneThread& operator=(const OneThread&) = delete;

    // Run `task` in the thread, and throw what it throws. A task may itself call this.
    void run(const std::function<void()>& task);

   private:
    void work();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::packaged_task<void()>> tasks_;
    bool ending_ = false;
    std::thread thread_;  // the last member, because it uses the others
};

}  // namespace pass
