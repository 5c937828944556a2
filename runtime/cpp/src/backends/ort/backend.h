// The ONNX Runtime backend: trunk and tails bound to buffers that stay on the device.
//
// A session serves every window width and batch; its bindings are kept for each plan and batch.
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

// The bundle's own trunk and tails, on the CPU or a GPU.
class OrtBackend : public Backend {
   public:
    // What must be opened before the base class can be constructed.
    struct Engine {
        std::shared_ptr<const OrtLibrary> library;
        Device device;
        std::unique_ptr<Memory> memory;
        Kernels kernels{};  // of the bundle's trunk for the CPU; empty if that is not what runs
    };

    // Throws Error if the device is missing or a graph cannot be loaded.
    OrtBackend(std::filesystem::path bundle, const Manifest& manifest, const LoadOptions& options);
    OrtBackend(std::filesystem::path bundle, const Manifest& manifest, const LoadOptions& options,
               Engine engine);

    void resize(std::int64_t capacity, std::span<const std::int64_t> lengths) override;
    void run_trunk(const Plan& plan, int batch) override;
    void run_tail(const PassKind& kind) override;

   protected:
    PassResult run_pass(const PassKind& kind) override;
    void run_prefill(int slot, const Plan& plan) override;

   private:
    void open_trunks(const LoadOptions& options);
    // Add `graph` to `uncaptured` if its session had to be opened without captures.
    void note_uncaptured(const OrtGraph& graph);
    // Run `work`, in the thread of the captured graphs if there is one.
    void in_thread(const std::function<void()>& work);
    void run_tails(const PassKind& kind);
    // Run `bound`. Throws DeviceLost if it fails because the device is lost.
    void run_bound(BoundGraph& bound);
    // Record that the graph in `file` could not be captured.
    void note_uncaptured(const std::string& file, const std::string& reason);
    std::vector<BoundTensor> bound_tensors(const std::vector<Binding>& bindings);
    // graph_id: the number of the CUDA graph. past, present: inputs and outputs of the KV cache.
    BoundGraph bind(int graph_id, const OrtGraph& graph, const Bindings& bindings,
                    const std::vector<BoundTensor>& past = {},
                    const std::vector<BoundTensor>& present = {});
    BoundGraph bind_trunk(int graph_id, const Plan& plan, int batch, int slot = 0,
                          bool prefill = false);
    // The session of a tail or another graph that follows the trunk, opened when it is first used.
    const OrtGraph& tail_session(const Graph& graph);

    std::filesystem::path bundle_;
    Engine engine_;
    std::unique_ptr<OrtGraph> trunk_;
    std::unique_ptr<OrtGraph> plain_trunk_;  // for passes without look-ahead rows; null: trunk_
    std::map<std::string, std::unique_ptr<OrtGraph>> tails_;  // by file
    // These are valid until the cache is resized.
    BoundGraphs<std::pair<std::string, int>> bound_trunks_;  // by plan and batch
    BoundGraphs<std::pair<int, int>> bound_prefills_;        // by width and slot
    // Tails, by plan, sampler, batch, and whether they read processed logits. The logits
    // processors, by plan, `processors_graph`, batch and touched_count. The graph of
    // log-probabilities, by plan, `logprobs_graph`, batch and 0.
    BoundGraphs<std::tuple<std::string, int, int, std::size_t>> bound_tails_;
    // Runs the graphs on devices with captures, because ONNX Runtime keeps captured graphs for each
    // thread separately; null on others. It is the last member, so that it ends first.
    std::unique_ptr<OneThread> thread_;
};

}  // namespace pass
