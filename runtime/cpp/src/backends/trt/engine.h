// A deserialized TensorRT engine, its profiles, and its contexts bound to device memory; and work that is run again and
// again: launched directly twice, captured after the second time, and then launched as a CUDA graph.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <span>
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

    auto operator<=>(const TrtBinding&) const = default;
};

// Device memory for activations. All contexts of all engines share it, because only one of them runs at a time. If
// an engine needs more than those before it, it gets a new block; what refers to an older one goes on using that.
class TrtScratch {
   public:
    explicit TrtScratch(Cuda& cuda) : cuda_(cuda) {}
    // A block of at least `size` bytes.
    std::span<std::byte> reserve(std::int64_t size);

   private:
    Cuda& cuda_;
    std::span<std::byte> block_;
};

// One engine file. Every binding has an execution context of its own, which is bound once: a CUDA graph is only good
// while the context that it was captured from keeps its profile, shapes and addresses.
class TrtEngine {
   public:
    // Throws Error if it cannot be loaded, or differs from the manifest.
    TrtEngine(TrtApi& api, Cuda& cuda, TrtScratch& scratch, const std::filesystem::path& path, const EngineFile& file);

    // Output -> the input whose memory it shares.
    const OrderedMap<std::string>& aliases() const { return file_.aliases; }
    // The first profile that admits `sizes`, which are named by symbolic dimension.
    int profile(const std::map<std::string, std::int64_t>& sizes) const;
    // Enqueue one run on the stream.
    void enqueue(const TrtBinding& binding);
    // Whether a run can be captured as a CUDA graph, as far as the library says.
    bool capturable(const TrtBinding& binding) { return context(binding).capturable(cuda_.stream()); }

   private:
    void check() const;
    void bind(TrtContext& context, const TrtBinding& binding);
    TrtContext& context(const TrtBinding& binding);
    // Of what failed in the library's `function`, with what the library said of it and CUDA's error.
    Error refusal(const std::string& what, const char* function);
    std::string reason();
    Error again(const std::string& what) const;

    TrtApi& api_;
    Cuda& cuda_;
    std::string path_;
    const EngineFile& file_;
    std::unique_ptr<TrtPlan> plan_;
    std::span<std::byte> scratch_;
    std::map<TrtBinding, std::unique_ptr<TrtContext>> contexts_;  // declared after the plan, so destroyed before it
};

// Engines that run one after another, and copies to the host after them. What cannot be captured is launched directly.
class TrtProgram {
   public:
    using Work = std::vector<std::pair<TrtEngine*, TrtBinding>>;
    // A copy from a device address into pinned host memory.
    struct Copy {
        std::byte* host;
        const std::byte* address;
        std::size_t size;
    };

    // name: for the log. uncaptured: takes the name and the reason if the work cannot be captured.
    TrtProgram(std::string name, Cuda& cuda, std::map<std::string, std::string>& uncaptured, Work work,
               std::vector<Copy> copies = {})
        : name_(std::move(name)),
          cuda_(cuda),
          uncaptured_(uncaptured),
          work_(std::move(work)),
          copies_(std::move(copies)) {}

    // Returns when the device is done.
    void run();

   private:
    void enqueue();
    // Tries it, once. The run before it has succeeded: nothing that goes wrong here is the request's affair.
    void capture();

    std::string name_;
    Cuda& cuda_;
    std::map<std::string, std::string>& uncaptured_;
    Work work_;
    std::vector<Copy> copies_;
    int runs_ = 0;
    void* graph_ = nullptr;
};

}  // namespace pass
