// The TensorRT backend: each pass is one captured CUDA graph, of trunk, tail, and the copy of what
// the pass emits to pinned host memory.
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

class TrtBackend : public Backend {
   public:
    // Throws Error if no engine set fits this GPU, or an engine cannot be loaded.
    TrtBackend(const std::filesystem::path& bundle, const Manifest& manifest,
               const LoadOptions& options, std::unique_ptr<TrtApi> api, CudaApi cuda);

    std::int64_t capacity() const override { return capacity_; }
    void resize(std::int64_t capacity, std::span<const std::int64_t> lengths) override;
    void run_trunk(const Window& window, int batch) override;
    void run_tail(const PassKind& kind) override;

   protected:
    PassResult run_pass(const PassKind& kind) override;
    void run_prefill(int slot, const Window& window) override;

   private:
    // What must be opened before the base class can be constructed.
    struct Opened {
        const EngineSet& engines;
        std::unique_ptr<TrtApi> api;
        std::unique_ptr<Cuda> cuda;
    };
    enum class Graphs { trunk, tail, pass, prefill };
    // Graphs, window, batch size (of a prefill: its slot), sampler, whether there are
    // log-probabilities, touched_count.
    using Key = std::tuple<Graphs, std::string, int, Sampler, bool, std::size_t>;

    TrtBackend(const std::filesystem::path& bundle, const Manifest& manifest,
               const LoadOptions& options, Opened opened);

    static Key key_of(Graphs graphs, const PassKind& kind);
    // For the log and `uncaptured`.
    std::string name_of(const Key& key) const;
    // There is one for every key and value of `columns_`, because a captured graph contains
    // addresses and shapes.
    TrtProgram& program(const Key& key, const std::function<TrtProgram::Work()>& make_work);
    TrtProgram::Call bind_trunk(const Window& window, int batch, int slot, bool prefill);
    std::vector<TrtProgram::Call> bind_tails(const PassKind& kind);
    TrtProgram::Call bind_tail(const PassKind& kind, const Graph& graph, const Bindings& bindings);
    // A call without a profile.
    EngineCall call_of(const Bindings& bindings);
    // Pinned host memory for an output of `count` numbers, the same in every pass.
    std::int64_t* result(const std::string& name, std::size_t count);
    // Loaded when it is first used.
    TrtEngine& engine(const Graph& graph);

    const EngineSet& engine_set_;
    Cuda& cuda_;  // the base class's `memory_`
    std::unique_ptr<TrtApi> api_;
    std::span<std::byte> scratch_;
    std::map<std::string, std::unique_ptr<TrtEngine>> engines_;             // by graph file
    std::map<std::pair<std::int64_t, Key>, TrtProgram> programs_;           // by columns and key
    std::map<std::pair<std::string, std::size_t>, std::int64_t*> results_;  // by name and count
    std::int64_t capacity_ = 0;
    std::int64_t columns_ = 0;  // the engines' smallest capacity that holds `capacity_`
};

// Whether engines of the bundle fit this machine.
bool has_fitting_engines(const Manifest& manifest, const LoadOptions& options);

}  // namespace pass
