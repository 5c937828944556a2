// The TensorRT backend: trunk and tail of a plan are captured as one CUDA graph, which is launched for every pass.
//
// Ids, lengths, logits and the KV cache never leave the device. The emitted tokens are copied to pinned memory inside
// the graph, so that the host only launches and waits.
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

// Runs the engines of one engine set.
class TrtBackend : public Backend {
   public:
    // Opens the engine set of `library` that fits the GPU. `options` may limit it to less than it was built for. Throws
    // Error if no set fits, or an engine cannot be loaded.
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
    // What the constructor of the base class needs.
    struct Opened {
        const EngineSet& engines;
        std::unique_ptr<TrtApi> api;
        std::unique_ptr<Cuda> cuda;
    };
    enum class Graphs { trunk, tail, pass, prefill };
    // The key of a program at one capacity: its graphs, plan, batch size (prefill: the slot), sampler,
    // log-probabilities, the length of the processors' lists.
    using Key = std::tuple<Graphs, std::string, int, Sampler, bool, std::size_t>;
    // What a program runs.
    struct Work {
        TrtProgram::Work engines;
        std::vector<TrtProgram::Copy> copies = {};
    };

    TrtBackend(std::filesystem::path bundle, const Manifest& manifest, const LoadOptions& options, Opened opened);

    static Key key_of(Graphs graphs, const PassKind& kind);
    // For the log, of a program at the present capacity.
    std::string name_of(const Key& key) const;
    // The program of `key`, which `make` makes if it is new. A captured graph contains addresses and shapes, so
    // there is one for every kind of pass and every capacity.
    TrtProgram& program(const Key& key, const std::function<Work()>& make);
    std::pair<TrtEngine*, TrtBinding> bind_trunk(const Plan& plan, int batch, int slot, bool prefill);
    TrtProgram::Work bind_tails(const PassKind& kind);
    std::pair<TrtEngine*, TrtBinding> bind_tail(const PassKind& kind, const Graph& graph, const Bindings& bindings);
    // The shapes of the inputs and the addresses of all tensors.
    TrtBinding placed(const Bindings& bindings);
    // Pinned memory for `count` numbers; the same memory for the same arguments.
    std::int64_t* result(const std::string& name, std::size_t count);
    TrtEngine& engine(const Graph& graph);

    std::filesystem::path bundle_;
    const EngineSet& set_;
    Cuda& cuda_;  // the base's memory
    std::unique_ptr<TrtApi> api_;
    TrtScratch scratch_{cuda_};
    std::map<std::string, std::unique_ptr<TrtEngine>> engines_;  // by graph file
    std::map<std::pair<std::int64_t, Key>, TrtProgram> programs_;
    std::map<std::pair<std::string, std::size_t>, std::int64_t*> results_;
    std::int64_t capacity_ = 0, columns_ = 0;
};

// The library of an engine set in the bundle that fits this machine; empty if there is none.
std::string find_engines(const Manifest& manifest, const LoadOptions& options);

// Opens the backend with the engines of `library`.
std::unique_ptr<Backend> open_trt_backend(const std::filesystem::path& bundle, const Manifest& manifest,
                                          const std::string& library, const LoadOptions& options);

}  // namespace pass
