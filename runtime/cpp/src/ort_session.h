// A graph that ONNX Runtime has loaded, and the same bound to memory.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "manifest.h"
#include "ort_devices.h"
#include "ort_library.h"
#include "shared_tensors.h"

namespace pass {

// A graph's tensor and the memory it lies in.
struct BoundTensor {
    std::string name;
    std::string dtype;
    std::vector<std::int64_t> shape;
    std::byte* address;
};

class OrtGraph;

// A graph bound to memory. On CUDA it is captured as a graph of its own: addresses and shapes stay the same.
class Bound {
   public:
    Bound(const OrtGraph& graph, const std::vector<BoundTensor>& inputs, const std::vector<BoundTensor>& outputs);
    // Throws Error where ONNX Runtime fails, as when memory runs out.
    void run() const;

   private:
    const OrtGraph* graph_;
    std::vector<Owned<OrtValue>> values_;
    Owned<OrtIoBinding> binding_;
    Owned<OrtRunOptions> options_;
};

class OrtGraph {
   public:
    // threads: 0 lets ONNX Runtime choose. shared: constants that it reads where they are, and which outlive it; may be
    // null. Throws Error where it cannot be loaded.
    OrtGraph(std::shared_ptr<const OrtLibrary> library, const Device& device, const std::filesystem::path& path,
             int threads, const SharedTensors* shared);

    // Its own inputs, outputs and (with `manifest`, for a trunk) metadata must be what the manifest says.
    void check(const Graph& described, const Manifest* manifest = nullptr) const;

    const OrtLibrary& library() const { return *library_; }
    OrtSession* session() const { return session_.get(); }
    const Device& device() const { return device_; }
    // Of the next CUDA graph that is captured.
    int next_id() const { return next_id_++; }

   private:
    Owned<OrtSessionOptions> session_options(int threads, const SharedTensors* shared) const;
    void check_tensors(const Graph& described, bool inputs) const;
    void check_metadata(const Manifest& manifest) const;

    std::shared_ptr<const OrtLibrary> library_;
    const Device& device_;
    Owned<OrtSession> session_;
    mutable int next_id_ = 1;
};

}  // namespace pass
