// Graphs that ONNX Runtime has loaded, and the constants that they share.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/memory.h"
#include "backends/ort/devices.h"
#include "backends/ort/library.h"
#include "bundle/manifest.h"

namespace pass {

// The constants that all tails share, memory-mapped from their files: the noise tables and the
// draft head. ONNX Runtime itself would keep a copy of them in memory for every tail.
class SharedTensors {
   public:
    SharedTensors(std::shared_ptr<const OrtLibrary> library, const std::filesystem::path& bundle,
                  const Manifest& manifest);

    // The constants, with their names in the graphs.
    const std::vector<std::pair<std::string, Owned<OrtValue>>>& values() const { return values_; }

   private:
    void add(const std::string& name, const MappedFile& file, std::size_t offset, std::size_t size,
             const std::vector<std::int64_t>& shape, ONNXTensorElementDataType type);

    std::shared_ptr<const OrtLibrary> library_;
    std::vector<std::unique_ptr<MappedFile>> files_;
    std::vector<std::pair<std::string, Owned<OrtValue>>> values_;
};

// ONNX Runtime's type of the same name as `dtype`.
ONNXTensorElementDataType element_type(const std::string& dtype);

// A session of ONNX Runtime for one graph.
class OrtGraph {
   public:
    // threads: 0 lets ONNX Runtime choose. shared: null, or constants that replace those of the
    // file and outlive the graph. kernels: the library of operators that the graph has; empty if
    // all are standard. Throws Error if the graph cannot be loaded.
    OrtGraph(std::shared_ptr<const OrtLibrary> library, const Device& device,
             const std::filesystem::path& path, int threads, const SharedTensors* shared,
             const std::filesystem::path& kernels = {});

    // Throws Error if tensors differ from `described`, or the trunk's metadata from `manifest`.
    void check(const Graph& described, const Manifest* manifest = nullptr) const;

    const OrtLibrary& library() const { return *library_; }
    const std::string& file() const { return file_; }  // its name alone
    OrtSession* session() const { return session_.get(); }
    const Device& device() const { return device_; }
    // Whether its first run is captured as a CUDA graph.
    bool captures() const { return captures_; }
    // Why it cannot be captured; empty if it is captured, or the device has no CUDA graphs.
    const std::string& why_not_captured() const { return why_not_captured_; }

   private:
    Owned<OrtSessionOptions> session_options(int threads, const SharedTensors* shared,
                                             const std::filesystem::path& kernels) const;
    // If files of the bundle are symbolic links, map the files of weights and give them to a
    // session: ONNX Runtime itself opens none that is outside the model's folder.
    void map_linked(const std::filesystem::path& bundle, OrtSessionOptions* options);
    template <class Count, class Name, class Info>
    void check_tensors(const std::vector<Tensor>& described, const std::string& file,
                       OrtAllocator* allocator, Count get_count, Name get_name,
                       Info get_info) const;

    std::shared_ptr<const OrtLibrary> library_;
    std::string file_;
    Device device_;
    std::vector<std::unique_ptr<MappedFile>> weights_;  // of linked bundles; outlive the session
    Owned<OrtSession> session_;
    bool captures_ = false;
    std::string why_not_captured_;
};

}  // namespace pass
