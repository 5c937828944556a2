// A TensorRT engine with its contexts, and calls that are replayed as CUDA graphs.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda.h"
#include "backends/trt/api.h"
#include "bundle/manifest.h"
#include "bundle/open_files.h"

namespace pass {

// What an engine is run with: a profile, the inputs' shapes, and the address of each tensor.
struct EngineCall {
    int profile = 0;
    std::map<std::string, Shape> shapes;
    std::map<std::string, std::byte*> addresses;

    auto operator<=>(const EngineCall&) const = default;
};

// The shapes of an engine's tensors, by name. A size that is a name is dynamic.
using EngineShapes = std::map<std::string, std::vector<Dimension>>;

// The shapes of the tensors of `graph` in an engine for a cache of `capacity` tokens, whose windows
// have at least `least_width` rows. The trunk has one more input, `columns`; its length says how
// many cache entries the pass reads.
EngineShapes engine_shapes(const Graph& graph, std::int64_t capacity, int least_width, bool trunk);

// Device memory for activations, which all contexts of all engines share, because only one runs at
// a time. If an engine needs a larger block, a new one is allocated; older contexts keep theirs.
class TrtScratch {
   public:
    explicit TrtScratch(Cuda& cuda) : cuda_(cuda) {}
    // A block of at least `size` bytes.
    std::span<std::byte> reserve(std::int64_t size);

   private:
    Cuda& cuda_;
    std::span<std::byte> block_;
};

// One engine file. Every distinct call has its own execution context, which is bound once, because
// a CUDA graph is valid only while the context that it was captured from keeps its arguments.
class TrtEngine {
   public:
    // files: all engines of the set. file: this one. shapes: from `engine_shapes`. Throws Error if
    // the engine does not load or has others.
    TrtEngine(TrtApi& api, Cuda& cuda, TrtScratch& scratch, const OpenFiles& files,
              const EngineFile& file, const EngineShapes& shapes);

    // Output -> the input whose memory it shares.
    const OrderedMap<std::string>& aliases() const { return file_.aliases; }
    // The first profile that admits `sizes` (dimension's name -> size). Throws Error if none does.
    int profile(const std::map<std::string, std::int64_t>& sizes) const;
    // Put one run on the stream. Throws Error if the library refuses it.
    void enqueue(const EngineCall& call);
    // Whether the call can be captured as a CUDA graph.
    bool capturable(const EngineCall& call) { return context(call).capturable(cuda_.stream()); }

   private:
    // Throws Error if the engine's profiles, aliases or shapes are not those of the manifest.
    void check(const EngineShapes& shapes) const;
    void bind(TrtContext& context, const EngineCall& call);
    // The context for `call`, which is made and bound when it is first used.
    TrtContext& context(const EngineCall& call);
    // The error to throw if the library's `function` failed. what: what the engine did not do.
    Error refusal(const std::string& what, const char* function);
    // What the library and CUDA say of the last failure. Throws DeviceLost if the device is lost.
    std::string reason();
    // The error to throw if the engine has to be built again. what: what is wrong with it.
    Error outdated(const std::string& what) const;

    TrtApi& api_;
    Cuda& cuda_;
    std::string path_;
    const EngineFile& file_;
    std::unique_ptr<TrtCudaEngine> engine_;
    std::span<std::byte> scratch_;
    std::map<EngineCall, std::unique_ptr<TrtContext>> contexts_;  // destroyed before engine_
};

// Engine calls one after another, then copies of their results to the host. After two runs the work
// is captured as a CUDA graph, which later runs replay. If that fails, they enqueue all calls.
class TrtProgram {
   public:
    using Call = std::pair<TrtEngine*, EngineCall>;
    // A copy from a device address into pinned host memory.
    struct Copy {
        std::byte* host;
        const std::byte* address;
        std::size_t size;
    };
    struct Work {
        std::vector<Call> calls;
        std::vector<Copy> copies = {};
    };

    // uncaptured: receives `name` and the reason if the work cannot be captured.
    TrtProgram(std::string name, Cuda& cuda, std::map<std::string, std::string>& uncaptured,
               Work work)
        : name_(std::move(name)), cuda_(cuda), uncaptured_(uncaptured), work_(std::move(work)) {}

    // Run the work, and return when the device has done it.
    void run();

   private:
    void enqueue();
    // Capture the work. If that fails, only note the reason in `uncaptured` and in the log.
    void capture();

    std::string name_;
    Cuda& cuda_;
    std::map<std::string, std::string>& uncaptured_;
    Work work_;
    int runs_ = 0;           // without the graph
    void* graph_ = nullptr;  // null until the work is captured
};

}  // namespace pass
