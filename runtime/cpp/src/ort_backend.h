// ONNX Runtime backend: trunk and tails bound to buffers that stay on the device.
//
// One session serves every window width and batch; what is bound is kept by plan and batch.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "backend.h"
#include "ort_session.h"

namespace pass {

class OrtBackend : public Backend {
   public:
    // Throws Error where the device is not there or a graph cannot be loaded.
    OrtBackend(std::filesystem::path bundle, const Manifest& manifest, const LoadOptions& options);

    void resize(std::int64_t capacity, std::span<const std::int64_t> lengths) override;
    void run_trunk(const Plan& plan, int batch) override;
    void run_tail(const PassKind& kind) override;

   protected:
    void run_prefill(int slot, const Plan& plan) override;

   private:
    // What there must be before the base class.
    struct Engine {
        std::shared_ptr<const OrtLibrary> library;
        const Device* device;
    };

    OrtBackend(std::filesystem::path bundle, const Manifest& manifest, const LoadOptions& options, Engine engine);

    Bound bind(const OrtGraph& graph, const Bindings& bindings);
    Bound bind_trunk(const Bindings& bindings, int slot, int batch);
    const OrtGraph& tail_graph(const Graph& graph);

    std::filesystem::path bundle_;
    Engine engine_;
    std::unique_ptr<SharedTensors> shared_;
    std::unique_ptr<OrtGraph> trunk_;
    std::map<std::string, std::unique_ptr<OrtGraph>> tails_;          // by file
    std::map<std::pair<std::string, int>, Bound> bound_trunks_;       // by plan and batch, for the present cache
    std::map<std::pair<int, int>, Bound> bound_prefills_;             // by width and slot, for the present cache
    std::map<std::tuple<std::string, int, int>, Bound> bound_tails_;  // by plan, sampler or -1, and batch
};

}  // namespace pass
