// A graph bound to memory, and how ONNX Runtime captures it as a CUDA graph.
//
// With the provider option `enable_cuda_graph` the first run of a graph number is not one run of the graph. ONNX
// Runtime runs it until it allocates no more memory (twice), captures it, which computes nothing, and launches what it
// captured. A tail that writes the next window over the one that it reads would go on by three tokens at once. What
// such a graph overwrites is therefore saved before the first run and put back after it, and the graph is run once
// more.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
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
    int number;                                      // of the CUDA graph
    Memory* memory;                                  // what the tensors are part of
    std::vector<BoundTensor> overwritten;            // inputs whose memory is that of an output; not those of the KV
                                                     // cache, in which the same inputs write the same entries
    std::function<void(const std::string&)> failed;  // is told why, where the graph cannot be captured
};

// The inputs whose memory is that of an output.
std::vector<BoundTensor> overwritten(const std::vector<BoundTensor>& inputs, const std::vector<BoundTensor>& outputs);

// A new number for a CUDA graph.
int next_cuda_graph();

class BoundGraph {
   public:
    // capture: without it, and where the session does not capture, every run is one run of the graph.
    BoundGraph(const OrtGraph& graph, const std::vector<BoundTensor>& inputs, const std::vector<BoundTensor>& outputs,
               std::optional<Capture> capture = std::nullopt);
    // Runs the graph once. Throws Error where ONNX Runtime fails, for example for lack of memory.
    void run();

   private:
    // The first run. Where it fails, the graph runs as if nothing had been tried, now and from then on.
    void run_and_capture();
    void run_bound() const;
    Owned<OrtRunOptions> options_of(int number) const;

    const OrtGraph* graph_;
    std::vector<Owned<OrtValue>> values_;
    Owned<OrtIoBinding> binding_;
    std::optional<Capture> capture_;  // until the graph is captured, or cannot be
    Owned<OrtRunOptions> options_;
};

}  // namespace pass
