#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "backends/ort/devices.h"
#include "backends/ort/library.h"
#include "bundle/open_files.h"

namespace pass {

// ONNX Runtime's type of the same name as `dtype`.
ONNXTensorElementDataType element_type(const std::string& dtype);

// A session of ONNX Runtime for one graph.
class OrtGraph {
   public:
    // files: must outlive the graph. threads: 0 lets ONNX Runtime choose. kernels: the library of
    // the graph's operators; empty if all are standard. Throws Error if it cannot be loaded.
    OrtGraph(std::shared_ptr<const OrtLibrary> library, const Device& device,
             const OpenFiles& files, const std::string& file, int threads,
             const std::filesystem::path& kernels = {});

    const OrtLibrary& library() const { return *library_; }
    const std::string& file() const { return file_; }  // its name alone
    OrtSession* session() const { return session_.get(); }
    const Device& device() const { return device_; }
    // Whether its first run is captured as a CUDA graph.
    bool captures() const { return captures_; }
    // Empty if it is captured, or the device has no CUDA graphs.
    const std::string& why_not_captured() const { return why_not_captured_; }

   private:
    Owned<OrtSessionOptions> session_options(const OpenFiles& files, int threads,
                                             const std::filesystem::path& kernels) const;

    std::shared_ptr<const OrtLibrary> library_;
    std::string file_;
    Device device_;
    Owned<OrtSession> session_;
    bool captures_ = false;
    std::string why_not_captured_;
};

}  // namespace pass
