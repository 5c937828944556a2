// A deserialized TensorRT engine, its profiles, and its contexts bound to device memory; and work that is run again and
// again: launched directly twice, captured after the second time, and then launched as a CUDA graph.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda.h"
#include "backends/trt/api.h"
#include "bundle/manifest.h"

namespace pass {

// One way to run an engine: the profile, the shapes of its inputs, and the address of every tensor.
struct TrtBinding {
    int profile = 0;
    std::map<std::string, Shape> shapes;
    std::map<std::string, std::byte*> addresses;

    bool operator==(const TrtBinding&) const = default;
};

// One engine file. It has an execution context for every profile in use.
class TrtEngine {
   public:
    // Throws Error where it cannot be loaded, or differs from the manifest.
    TrtEngine(TrtApi& api, Cuda& cuda, const std::filesystem::path& path, const EngineFile& file);

    // Output -> the input whose memory it shares.
    const Ordered<std::string>& aliases() const { return file_.aliases; }
    // The first profile that admits `sizes`, which are named by symbolic dimension.
    int profile(const std::map<std::string, std::int64_t>& sizes) const;
    // Enqueue one run on the stream.
    void enqueue(const TrtBinding& binding);
    // Whether a run can be captured as a CUDA graph.
    bool capturable(const TrtBinding& binding) { return context(binding.profile).capturable(cuda_.stream()); }

   private:
    void check() const;
    void bind(TrtContext& context, const TrtBinding& binding);
    TrtContext& context(int profile);
    Error again(const std::string& what) const;

    Cuda& cuda_;
    std::string path_;
    const EngineFile& file_;
    std::unique_ptr<TrtPlan> plan_;
    std::byte* scratch_ = nullptr;  // shared by all contexts, since only one runs at a time
    std::map<int, std::unique_ptr<TrtContext>>
        contexts_;                     // by profile; declared after the plan, so destroyed before it
    std::map<int, TrtBinding> bound_;  // what each context is bound to
};

// Engines that run one after another, and copies to the host after them.
class TrtProgram {
   public:
    using Work = std::vector<std::pair<TrtEngine*, TrtBinding>>;
    // A copy from a device address into pinned host memory.
    struct Copy {
        std::byte* host;
        const std::byte* address;
        std::size_t size;
    };

    TrtProgram(Cuda& cuda, Work work, std::vector<Copy> copies = {})
        : cuda_(cuda), work_(std::move(work)), copies_(std::move(copies)) {}

    // Returns when the device is done.
    void run();

   private:
    void enqueue();

    Cuda& cuda_;
    Work work_;
    std::vector<Copy> copies_;
    bool repeated_ = false;
    void* graph_ = nullptr;
};

}  // namespace pass
