// A graph that ONNX Runtime has loaded, and a graph bound to memory.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "backends/ort/devices.h"
#include "backends/ort/library.h"
#include "backends/ort/shared_tensors.h"
#include "bundle/manifest.h"

namespace pass {

// A tensor of a graph, and its memory.
struct BoundTensor {
    std::string name;
    std::string dtype;
    std::vector<std::int64_t> shape;
    std::byte* address;
};

// A new number for a CUDA graph.
int next_cuda_graph();

class OrtGraph;

// A graph bound to memory. On CUDA, ONNX Runtime captures it as a CUDA graph, since addresses and shapes do not change.
class BoundGraph {
   public:
    // cuda_graph: the number of its CUDA graph; -1: it is not captured.
    BoundGraph(const OrtGraph& graph, const std::vector<BoundTensor>& inputs, const std::vector<BoundTensor>& outputs,
               int cuda_graph = -1);
    // Throws Error where ONNX Runtime fails, for example for lack of memory.
    void run() const;

   private:
    const OrtGraph* graph_;
    std::vector<Owned<OrtValue>> values_;
    Owned<OrtIoBinding> binding_;
    Owned<OrtRunOptions> options_;
};

class OrtGraph {
   public:
    // threads: 0 lets ONNX Runtime choose. shared: constants that the graph reads in place, which must outlive it; may
    // be null. packed: ONNX Runtime wrote the graph, optimized and with packed weights. Throws Error where the graph
    // cannot be loaded.
    OrtGraph(std::shared_ptr<const OrtLibrary> library, const Device& device, const std::filesystem::path& path,
             int threads, const SharedTensors* shared, bool packed = false);

    // Throws Error where the inputs, outputs or (with `manifest`, for a trunk) metadata differ from the manifest.
    void check(const Graph& described, const Manifest* manifest = nullptr) const;

    const OrtLibrary& library() const { return *library_; }
    OrtSession* session() const { return session_.get(); }
    const Device& device() const { return device_; }
    // Why runs are not captured as CUDA graphs, where the device could; else empty.
    const std::string& not_captured() const { return not_captured_; }

   private:
    Owned<OrtSessionOptions> session_options(int threads, const SharedTensors* shared, bool packed) const;
    template <class Count, class Name, class Info>
    void check_tensors(const std::vector<Tensor>& described, const std::string& file, OrtAllocator* allocator,
                       Count count_of, Name name_of, Info info_of) const;

    std::shared_ptr<const OrtLibrary> library_;
    Device device_;
    Owned<OrtSession> session_;
    std::string not_captured_;
};

}  // namespace pass
