// Graphs bound to memory, and how ONNX Runtime captures them as CUDA graphs.
//
// With the provider option `enable_cuda_graph`, the first run with a new graph number executes the
// graph three times: ONNX Runtime runs it until a run allocates no memory (twice), captures it,
// which computes nothing, and launches what it captured. But a tail overwrites the window that it
// reads with the next one, so three executions would skip two windows. Overwritten inputs are
// therefore saved before the first run and restored after it, and the graph runs once more.
#pragma once

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
#include <vector>

#include "backends/memory.h"
#include "backends/ort/library.h"
#include "backends/ort/session.h"

namespace pass {

// A tensor of a graph, and its memory.
struct BoundTensor {
    std::string name;
    std::string dtype;
    std::vector<std::int64_t> shape;
    std::byte* address;

    std::size_t size() const;  // in bytes
};

// What capturing a graph needs.
struct Capture {
    int graph_id;    // the number of the CUDA graph
    Memory* memory;  // of the tensors
    // Overwritten inputs but the KV cache, where every run writes the same values.
    std::vector<BoundTensor> in_place;
    // Receives the reason if the graph cannot be captured.
    std::function<void(const std::string&)> on_failure;
};

// The inputs that share an output's address.
std::vector<BoundTensor> in_place_inputs(const std::vector<BoundTensor>& inputs,
                                         const std::vector<BoundTensor>& outputs);

// A new number for a CUDA graph.
int next_graph_id();

class BoundGraph {
   public:
    // capture: none runs the graph without captures. Ignored if the session does not capture.
    BoundGraph(const OrtGraph& graph, const std::vector<BoundTensor>& inputs,
               const std::vector<BoundTensor>& outputs,
               std::optional<Capture> capture = std::nullopt);
    // Runs the graph once. Throws Error if ONNX Runtime fails, for example for lack of memory.
    void run();

   private:
    // The first run. If it fails, this run and all later ones are without captures.
    void run_and_capture();
    void run_bound() const;
    Owned<OrtRunOptions> options_of(int graph_id) const;

    const OrtGraph* graph_;
    std::vector<Owned<OrtValue>> values_;
    Owned<OrtIoBinding> binding_;
    std::optional<Capture> capture_;  // until the first run
    Owned<OrtRunOptions> options_;
};

// The bound graphs used last, by key. ONNX Runtime keeps every CUDA graph that it captured, so a
// key keeps its graph number when its graph is dropped and bound to the same addresses again.
template <class Key>
class BoundGraphs {
   public:
    // The bound graph of `key`; if there is none, `make` makes it with the key's graph number.
    template <class Make>
    BoundGraph& get(const Key& key, const Make& make) {
        auto found = bound_.find(key);
        if (found == bound_.end()) {
            int& graph_id = graph_ids_[key];
            if (graph_id == 0) graph_id = next_graph_id();
            found = bound_.emplace(key, Kept{make(graph_id), 0}).first;
            if (bound_.size() > max_bound_graphs) bound_.erase(oldest(found));
        }
        found->second.last_use = ++uses_;
        return found->second.bound;
    }

    // Forget all, because addresses have changed.
    void clear() {
        bound_.clear();
        graph_ids_.clear();
    }

   private:
    struct Kept {
        BoundGraph bound;
        std::uint64_t last_use;
    };
    using Map = std::map<Key, Kept>;

    // The least recently used bound graph but `spared`.
    typename Map::iterator oldest(typename Map::iterator spared) {
        auto found = bound_.end();
        for (auto each = bound_.begin(); each != bound_.end(); ++each) {
            if (each != spared &&
                (found == bound_.end() || each->second.last_use < found->second.last_use))
                found = each;
        }
        return found;
    }

    static constexpr std::size_t max_bound_graphs = 256;

    Map bound_;
    std::map<Key, int> graph_ids_;
    std::uint64_t uses_ = 0;
};

// Runs tasks one after another in its own thread, because captured graphs belong to the thread that
// captured them. The thread ends with this object, after the tasks in its queue.
class OneThread {
   public:
    // context: makes an object that the thread holds while it lives.
    explicit OneThread(std::function<std::shared_ptr<void>()> context);
    ~OneThread();
    OneThread(const OneThread&) = delete;
    OneThread& operator=(const OneThread&) = delete;

    // Returns when `task` is done, and throws what it throws. A task may call `run`.
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
