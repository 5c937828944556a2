// The TensorRT backend: each pass replays trunk and tail of its plan as one captured CUDA graph.
//
// Ids, lengths, logits and the KV cache never leave the device. The graph copies what a pass emits
// to pinned host memory, so the host only launches the graph and waits.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "backends/backend.h"
#include "backends/trt/engine.h"
#include "pass/options.hpp"

namespace pass {

// Runs the engines of one set.
class TrtBackend : public Backend {
   public:
    // Opens the engine set for this GPU. Throws Error if none fits, or an engine cannot be loaded.
    TrtBackend(std::filesystem::path bundle, const Manifest& manifest, const std::string& library,
               const LoadOptions& options, std::unique_ptr<TrtApi> api, CudaApi cuda);
    ~TrtBackend() override;
    TrtBackend(const TrtBackend&) = delete;
    TrtBackend& operator=(const TrtBackend&) = delete;

    std::int64_t capacity() const override { return capacity_; }
    void resize(std::int64_t capacity, std::span<const std::int64_t> lengths) override;
    void run_trunk(const Plan& plan, int batch) override;
    void run_tail(const PassKind& kind) override;

   protected:
    PassResult run_pass(const PassKind& kind) override;
    void run_prefill(int slot, const Plan& plan) override;

   private:
    // What must be opened before the base class can be constructed.
    struct Opened {
        const EngineSet& engines;
        std::unique_ptr<TrtApi> api;
        std::unique_ptr<Cuda> cuda;
    };
    enum class Graphs { trunk, tail, pass, prefill };
    // What a program runs: graphs, plan, batch size (of a prefill: its slot), sampler, whether
    // there are log-probabilities, touched_count.
    using Key = std::tuple<Graphs, std::string, int, Sampler, bool, std::size_t>;

    TrtBackend(std::filesystem::path bundle, const Manifest& manifest, const LoadOptions& options,
               Opened opened);

    static Key key_of(Graphs graphs, const PassKind& kind);
    // The name of a program for the log and `uncaptured`.
    std::string name_of(const Key& key) const;
    // The program of `key`. If there is none, `make_work` makes its work. There is one for every
    // key and value of `columns_`, because a captured graph contains addresses and shapes.
    TrtProgram& program(const Key& key, const std::function<TrtProgram::Work()>& make_work);
    TrtProgram::Call bind_trunk(const Plan& plan, int batch, int slot, bool prefill);
    std::vector<TrtProgram::Call> bind_tails(const PassKind& kind);
    TrtProgram::Call bind_tail(const PassKind& kind, const Graph& graph, const Bindings& bindings);
    // A call with the shapes of the inputs and the addresses of all tensors, but no profile yet.
    EngineCall call_of(const Bindings& bindings);
    // The pinned host memory for an output of `count` numbers, the same in every pass.
    std::int64_t* result(const std::string& name, std::size_t count);
    // The engine of `graph`, which is loaded when it is first used.
    TrtEngine& engine(const Graph& graph);

    std::filesystem::path bundle_;
    const EngineSet& engine_set_;
    Cuda& cuda_;  // the base class's `memory_`
    std::unique_ptr<TrtApi> api_;
    TrtScratch scratch_{cuda_};
    std::map<std::string, std::unique_ptr<TrtEngine>> engines_;             // by graph file
    std::map<std::pair<std::int64_t, Key>, TrtProgram> programs_;           // by columns and key
    std::map<std::pair<std::string, std::size_t>, std::int64_t*> results_;  // by name and count
    std::int64_t capacity_ = 0;
    std::int64_t columns_ = 0;  // the engines' smallest capacity that holds `capacity_`
};

// The name of the library whose engines in the bundle fit this machine; empty if none do.
std::string find_engine_library(const Manifest& manifest, const LoadOptions& options);

// Opens `library` and CUDA, and the backend with the bundle's engines for them.
std::unique_ptr<Backend> open_trt_backend(const std::filesystem::path& bundle,
                                          const Manifest& manifest, const std::string& library,
                                          const LoadOptions& options);

}  // namespace pass
