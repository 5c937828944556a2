// The ONNX Runtime backend. A session serves every window and batch; its bindings are kept for
// each.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "backends/backend.h"
#include "backends/ort/bound_graph.h"
#include "backends/ort/devices.h"
#include "backends/ort/kernels.h"
#include "backends/ort/session.h"

namespace pass {

class OrtBackend : public Backend {
   public:
    // What must be opened before the base class can be constructed.
    struct Engine {
        std::shared_ptr<const OrtLibrary> library;
        Device device;
        std::unique_ptr<Memory> memory;
        Kernels kernels{};  // of the bundle's trunk for the CPU, if that runs
    };

    // Throws Error if the device is missing or a graph cannot be loaded.
    OrtBackend(std::filesystem::path bundle, const Manifest& manifest, const LoadOptions& options);
    OrtBackend(std::filesystem::path bundle, const Manifest& manifest, const LoadOptions& options,
               Engine engine);

    void resize(std::int64_t capacity, std::span<const std::int64_t> lengths) override;
    void run_trunk(const Window& window, int batch) override;
    void run_tail(const PassKind& kind) override;

   protected:
    PassResult run_pass(const PassKind& kind) override;
    void run_prefill(int slot, const Window& window) override;

   private:
    void open_trunks(const LoadOptions& options);
    // If its session had to be opened without captures.
    void note_uncaptured(const OrtGraph& graph);
    void in_thread(const std::function<void()>& work);
    void run_tails(const PassKind& kind);
    // Throws DeviceLost if it fails because the device is lost.
    void run_bound(BoundGraph& bound);
    void note_uncaptured(const std::string& file, const std::string& reason);
    std::vector<BoundTensor> bound_tensors(const std::vector<Binding>& bindings);
    // past, present: inputs and outputs of the KV cache.
    BoundGraph bind(int graph_id, const OrtGraph& graph, const Bindings& bindings,
                    const std::vector<BoundTensor>& past = {},
                    const std::vector<BoundTensor>& present = {});
    BoundGraph bind_trunk(int graph_id, const Window& window, int batch, int slot = 0,
                          bool prefill = false);
    // Of a graph that follows the trunk, opened when it is first used.
    const OrtGraph& tail_session(const Graph& graph);

    std::filesystem::path bundle_;
    Engine engine_;
    std::unique_ptr<OrtGraph> trunk_;
    std::unique_ptr<OrtGraph> plain_trunk_;  // for passes without look-ahead rows; null: trunk_
    std::map<std::string, std::unique_ptr<OrtGraph>> tails_;  // by file
    // These are valid until the cache is resized.
    BoundGraphs<std::pair<std::string, int>> bound_trunks_;  // by window and batch
    BoundGraphs<std::pair<int, int>> bound_prefills_;        // by width and slot
    // Tails, by window, sampler, batch, and whether they read processed logits; logits processors,
    // by window, `processors_graph`, batch and touched_count; log-probabilities, by window,
    // `logprobs_graph`, batch and 0.
    BoundGraphs<std::tuple<std::string, int, int, std::size_t>> bound_tails_;
    // On devices with captures, because ONNX Runtime keeps captured graphs for each thread. The
    // last member, so that it ends first.
    std::unique_ptr<OneThread> thread_;
};

}  // namespace pass
