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

// What an engine is run with: the inputs' shapes, and the address of each tensor.
struct EngineCall {
    int profile = 0;
    std::map<std::string, Shape> shapes;
    std::map<std::string, std::byte*> addresses;

    auto operator<=>(const EngineCall&) const = default;
};

// One engine file. Every distinct call has its own execution context, which is bound once, because
// a CUDA graph is valid only while its context keeps its arguments.
class TrtEngine {
   public:
    // scratch: device memory for activations, which all engines share, because only one runs at a
    // time. If it is too small, it is replaced; older contexts keep theirs. files: all engines of
    // the set. Throws Error if the engine does not load.
    TrtEngine(TrtApi& api, Cuda& cuda, std::span<std::byte>& scratch, const OpenFiles& files,
              const EngineFile& file);

    // Output -> the input whose memory it shares.
    const std::map<std::string, std::string>& aliases() const { return file_.aliases; }
    // The first profile that admits `sizes`, by dimension. Throws Error if none does.
    int profile(const std::map<std::string, std::int64_t>& sizes) const;
    // Throws Error if the library refuses the run.
    void enqueue(const EngineCall& call);

   private:
    void bind(TrtContext& context, const EngineCall& call);
    TrtContext& context(const EngineCall& call);
    // The error to throw if the library's `function` failed.
    Error refusal(const std::string& what, const char* function);
    // Of the last failure. Throws DeviceLost if the device is lost.
    std::string reason();

    TrtApi& api_;
    Cuda& cuda_;
    std::string path_;
    const EngineFile& file_;
    std::unique_ptr<TrtCudaEngine> engine_;
    std::span<std::byte> scratch_;
    std::map<EngineCall, std::unique_ptr<TrtContext>> contexts_;  // destroyed before engine_
};

// Engine calls, then copies of their results to the host. After two runs the work is captured as a
// CUDA graph, which later runs replay. If that fails, they enqueue all calls.
class TrtProgram {
   public:
    using Call = std::pair<TrtEngine*, EngineCall>;
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

    // Returns when the device has done the work.
    void run();

   private:
    void enqueue();
    void capture();

    std::string name_;
    Cuda& cuda_;
    std::map<std::string, std::string>& uncaptured_;
    Work work_;
    int runs_ = 0;           // without the graph
    void* graph_ = nullptr;  // null until the work is captured
};

}  // namespace pass
