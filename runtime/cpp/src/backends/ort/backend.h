// The ONNX Runtime backend: trunk and tails bound to buffers that stay on the device.
//
// A graph's session serves every window width and batch; bindings are kept by plan and batch.
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
    // What runs the graphs, and on which device.
    struct Engine {
        std::shared_ptr<const OrtLibrary> library;
        Device device;
        std::unique_ptr<Memory> memory;
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
    // Add `graph` to `uncaptured` if it could not be opened for captures.
    void note_capture(const OrtGraph& graph);
    // The trunk `file` with packed weights; null if there are none.
    std::unique_ptr<OrtGraph> open_packed(const std::string& file, const LoadOptions& options,
                                          const Kernels& kernels) const;
    // Run `work`, in the thread of the captured graphs if there is one.
    void in_thread(const std::function<void()>& work);
    void run_tails(const PassKind& kind);
    void run_bound(BoundGraph& bound);
    void not_captured(const std::string& file, const std::string& reason);
    std::vector<BoundTensor> bound_tensors(const std::vector<Binding>& bindings);
    // graph_id: the number of its CUDA graph. past, present: inputs and outputs of the KV cache.
    BoundGraph bind(int graph_id, const OrtGraph& graph, const Bindings& bindings,
                    const std::vector<BoundTensor>& past = {},
                    const std::vector<BoundTensor>& present = {});
    BoundGraph bind_trunk(int graph_id, const Plan& plan, int batch, int slot = 0,
                          bool prefill = false);
    const OrtGraph& tail_session(const Graph& graph);

    std::filesystem::path bundle_;
    Engine engine_;
    std::unique_ptr<SharedTensors> shared_;
    std::unique_ptr<OrtGraph> trunk_;
    std::unique_ptr<OrtGraph> plain_trunk_;  // for passes without look-ahead rows; null: trunk_
    std::map<std::string, std::unique_ptr<OrtGraph>> tails_;  // by file
    // Both are valid until the cache is resized.
    BoundGraphs<std::pair<std::string, int>> bound_trunks_;  // by plan and batch
    BoundGraphs<std::pair<int, int>> bound_prefills_;        // by width and slot
    // Tails by plan, sampler, batch, and whether they read processed logits. A constant in place of
    // the sampler stands for another graph: processors_graph, by plan, batch and touched_count, or
    // logprobs_graph, by plan and batch.
    BoundGraphs<std::tuple<std::string, int, int, std::size_t>> bound_tails_;
    // Runs the graphs if they are captured, because ONNX Runtime keeps captured graphs for each
    // thread separately. It is the last member, so that it ends first.
    std::unique_ptr<OneThread> thread_;
};

}  // namespace pass
