// The ONNX Runtime backend: trunk and tails bound to buffers that stay on the device.
//
// One ONNX Runtime session of a graph serves every window width and batch size; its bindings are cached by plan and
// batch.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "backends/backend.h"
#include "backends/ort/bound_graph.h"
#include "backends/ort/devices.h"
#include "backends/ort/session.h"

namespace pass {

class OrtBackend : public Backend {
   public:
    // What runs the graphs, and where. memory: the device's, which the backend takes.
    struct Engine {
        std::shared_ptr<const OrtLibrary> library;
        Device device;
        std::unique_ptr<Memory> memory;
    };

    // Throws Error if the device is missing or a graph cannot be loaded.
    OrtBackend(std::filesystem::path bundle, const Manifest& manifest, const LoadOptions& options);
    // On an engine that is open already.
    OrtBackend(std::filesystem::path bundle, const Manifest& manifest, const LoadOptions& options, Engine engine);

    void resize(std::int64_t capacity, std::span<const std::int64_t> lengths) override;
    void run_trunk(const Plan& plan, int batch) override;
    void run_tail(const PassKind& kind) override;

   protected:
    PassResult run_pass(const PassKind& kind) override;
    void run_prefill(int slot, const Plan& plan) override;

   private:
    void open_trunks(const LoadOptions& options);
    // Record of an open graph whether it is captured.
    void note_capture(const OrtGraph& graph);
    std::unique_ptr<OrtGraph> open_packed(const std::string& file, const LoadOptions& options) const;
    // Run `work`, in the thread whose captured graphs it uses if there is one.
    void in_thread(const std::function<void()>& work);
    void run_tails(const PassKind& kind);
    void run_bound(BoundGraph& bound);
    // How `graph` is captured; in_place: the inputs whose memory is that of an output.
    Capture capture_of(int cuda_graph, const OrtGraph& graph, std::vector<BoundTensor> in_place);
    void not_captured(const std::string& file, const std::string& reason);
    std::vector<BoundTensor> placed(const std::vector<Binding>& bindings);
    BoundGraph bind(int cuda_graph, const OrtGraph& graph, const Bindings& bindings);
    BoundGraph bind_trunk(int cuda_graph, const Plan& plan, const Bindings& bindings, int slot, int batch);
    const OrtGraph& tail_graph(const Graph& graph);

    std::filesystem::path bundle_;
    Engine engine_;
    std::unique_ptr<SharedTensors> shared_;
    std::unique_ptr<OrtGraph> trunk_;
    std::unique_ptr<OrtGraph> plain_trunk_;                   // for passes without look-ahead rows; may be null
    std::map<std::string, std::unique_ptr<OrtGraph>> tails_;  // by file
    BoundGraphs<std::pair<std::string, int>> bound_trunks_;   // by plan and batch, for the present KV cache
    BoundGraphs<std::pair<int, int>> bound_prefills_;         // by width and slot, for the present KV cache
    // By plan, sampler (or one of the constants in backend.cpp), batch, and the length of the processors' lists (tails:
    // whether there are processors).
    BoundGraphs<std::tuple<std::string, int, int, std::size_t>> bound_tails_;
    // On devices that capture graphs, because ONNX Runtime keeps those for each thread apart, and captures anew in
    // another one. It is the last member, so that it ends first.
    std::unique_ptr<OneThread> thread_;
};

}  // namespace pass
