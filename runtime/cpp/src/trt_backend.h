// TensorRT backend: trunk and tail of a plan as one captured CUDA graph, replayed pass after pass.
//
// Ids, lengths, logits and the KV cache never leave the device. What a pass emits is copied to pinned memory inside the
// graph, so that the host's part of a pass is a launch and a wait.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "backend.h"
#include "pass/options.hpp"
#include "trt_engine.h"
#include "trt_program.h"

namespace pass {

// The engines of one set.
class TrtBackend : public Backend {
   public:
    // The set of `library` that fits GPU 0, of which `cuda` is told; `options` may ask for less than it was built for.
    // Throws Error where none fits, or an engine cannot be loaded.
    TrtBackend(std::filesystem::path bundle, const Manifest& manifest, const std::string& library,
               const LoadOptions& options, std::unique_ptr<TrtApi> api, CudaApi cuda);

    std::int64_t capacity() const override { return capacity_; }
    void resize(std::int64_t capacity, std::span<const std::int64_t> lengths) override;
    void run_trunk(const Plan& plan, int batch) override;
    void run_tail(const PassKind& kind) override;

   protected:
    Emitted run_pass(const PassKind& kind) override;
    void run_prefill(int slot, const Plan& plan) override;

   private:
    // What there must be before the base class.
    struct Opened {
        const EngineSet& engines;
        std::unique_ptr<TrtApi> api;
        std::unique_ptr<Cuda> cuda;
    };
    enum class Graphs { trunk, tail, pass, prefill };
    // Of a program besides the columns that it reads: what it runs, a plan, batch or slot, sampler, log-probabilities.
    using Key = std::tuple<Graphs, std::string, int, Sampler, bool>;

    TrtBackend(std::filesystem::path bundle, const Manifest& manifest, const LoadOptions& options, Opened opened);

    static Key key_of(Graphs graphs, const PassKind& kind);
    // Addresses and shapes are part of a captured graph: there is one for every kind of pass and columns.
    TrtProgram& program(const Key& key, const std::function<TrtProgram()>& make);
    std::pair<TrtEngine*, TrtBinding> bind_trunk(const Plan& plan, int batch, int slot, bool prefill);
    TrtProgram::Work bind_tails(const PassKind& kind);
    std::pair<TrtEngine*, TrtBinding> bind_tail(const PassKind& kind, const Graph& graph, const Bindings& bindings);
    // The inputs' shapes, and every tensor's address.
    TrtBinding placed(const Bindings& bindings);
    // Pinned numbers, the same memory every time.
    std::int64_t* result(const std::string& name, std::size_t count);
    TrtEngine& engine(const Graph& graph);

    std::filesystem::path bundle_;
    const EngineSet& set_;
    Cuda& cuda_;  // the base's memory
    std::unique_ptr<TrtApi> api_;
    std::map<std::string, std::unique_ptr<TrtEngine>> engines_;  // by graph file
    std::map<std::pair<std::int64_t, Key>, TrtProgram> programs_;
    std::map<std::pair<std::string, std::size_t>, std::int64_t*> results_;
    std::int64_t capacity_ = 0, columns_ = 0;
};

// The library whose engines in the bundle fit this machine; empty where there is none.
std::string find_engines(const Manifest& manifest, const LoadOptions& options);

// The backend of that library, opened.
std::unique_ptr<Backend> open_trt_backend(const std::filesystem::path& bundle, const Manifest& manifest,
                                          const std::string& library, const LoadOptions& options);

}  // namespace pass
