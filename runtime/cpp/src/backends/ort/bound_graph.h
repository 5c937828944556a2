// Graphs bound to memory, and how ONNX Runtime captures them as CUDA graphs.
//
// With the provider option `enable_cuda_graph` the first run of a graph number is not one run of the graph. ONNX
// Runtime runs it until it allocates no more memory (twice), captures it, which computes nothing, and launches what it
// captured. A tail that writes the next window over the one that it reads would go on by three tokens at once. What
// such a graph overwrites is therefore saved before the first run and put back after it, and the graph is run once
// more.
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
    int number;      // of the CUDA graph
    Memory* memory;  // what the tensors are part of
    // In-place inputs, restored after the capture because it runs the graph several times. The KV cache is exempt:
    // reruns write the same values.
    std::vector<BoundTensor> in_place;
    std::function<void(const std::string&)> failed;  // is told why the graph cannot be captured
};

// The inputs whose memory is that of an output.
std::vector<BoundTensor> in_place_inputs(const std::vector<BoundTensor>& inputs,
                                         const std::vector<BoundTensor>& outputs);

// A new number for a CUDA graph.
int next_cuda_graph();

class BoundGraph {
   public:
    // capture: without it, and if the session does not capture, every run is one run of the graph.
    BoundGraph(const OrtGraph& graph, const std::vector<BoundTensor>& inputs, const std::vector<BoundTensor>& outputs,
               std::optional<Capture> capture = std::nullopt);
    // Runs the graph once. Throws Error if ONNX Runtime fails, for example for lack of memory.
    void run();

   private:
    // The first run. If it fails, the graph runs as if nothing had been tried, now and from then on.
    void run_and_capture();
    void run_bound() const;
    Owned<OrtRunOptions> options_of(int number) const;

    const OrtGraph* graph_;
    std::vector<Owned<OrtValue>> values_;
    Owned<OrtIoBinding> binding_;
    std::optional<Capture> capture_;  // until the graph is captured, or cannot be
    Owned<OrtRunOptions> options_;
};

// A cache of bound graphs, by key; the least recently used one is dropped.
//
// ONNX Runtime keeps every CUDA graph that it captured. A graph that is bound again to the same addresses therefore
// gets the number that it had, so that its captured graph is used again.
template <class Key>
class BoundGraphs {
   public:
    // The bound graph of `key`; `make` makes it, from the number of its CUDA graph, if it is not cached.
    template <class Make>
    BoundGraph& get(const Key& key, const Make& make) {
        auto found = bound_.find(key);
        if (found == bound_.end()) {
            const auto graph = graph_of_.emplace(key, 0).first;
            if (graph->second == 0) graph->second = next_cuda_graph();
            found = bound_.emplace(key, Kept{make(graph->second), 0}).first;
            if (bound_.size() > max_bound_graphs) bound_.erase(oldest(found));
        }
        found->second.used = ++uses_;
        return found->second.bound;
    }

    // To be called when addresses change.
    void clear() {
        bound_.clear();
        graph_of_.clear();
    }

   private:
    struct Kept {
        BoundGraph bound;
        std::uint64_t used;
    };
    using Map = std::map<Key, Kept>;

    typename Map::iterator oldest(typename Map::iterator spared) {
        auto found = bound_.end();
        for (auto one = bound_.begin(); one != bound_.end(); ++one) {
            if (one != spared && (found == bound_.end() || one->second.used < found->second.used)) found = one;
        }
        return found;
    }

    static constexpr std::size_t max_bound_graphs = 256;

    Map bound_;
    std::map<Key, int> graph_of_;
    std::uint64_t uses_ = 0;
};

// A thread for the work of a device whose captured graphs belong to the thread that captured them: it runs tasks one
// after another. The thread ends with this object, after the tasks that it was given.
class OneThread {
   public:
    // context: makes what the thread holds for as long as it runs, such as `Memory::for_this_thread`.
    explicit OneThread(std::function<std::shared_ptr<void>()> context);
    ~OneThread();
    OneThread(const OneThread&) = delete;
    OneThread& operator=(const OneThread&) = delete;

    // Returns when `task` is done, and throws what it throws. Any thread may call it, and a task too.
    void run(const std::function<void()>& task);

   private:
    void work();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::packaged_task<void()>> tasks_;
    bool ending_ = false;
    std::thread thread_;  // the last one, because it uses the others
};

}  // namespace pass
