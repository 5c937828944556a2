// The buffer that each tensor of a graph is bound to.
//
// Tensors with the same buffer and shape share memory, which is how data flows from graph to graph: the trunk's logits
// are the tail's, and an output that feeds an input of the next graph or pass shares its memory, as `next_ids` that of
// `input_ids`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "bundle/manifest.h"
#include "bundle/plan.h"
#include "bundle/tensors.h"
#include "pass/options.hpp"

namespace pass {

// An input that only a trunk for TensorRT has: its length is how many tokens of the KV cache a pass reads.
inline constexpr const char* columns_input = "columns";
// Prefix of the buffers of prefill, which are apart from the windows of the slots.
inline constexpr const char* prefill_scope = "prefill.";

const char* name_of(Sampler sampler);

using Bytes = std::vector<std::uint8_t>;

// The buffer of a tensor. by_slot: the buffer has a row for every slot, and a pass over b slots is bound to the first
// b. constant: the content of a buffer that no graph writes, else null.
struct Binding {
    std::string tensor;
    std::string buffer;
    std::vector<std::int64_t> shape;
    std::string dtype;
    bool by_slot = true;
    std::shared_ptr<const Bytes> constant;
};

// The bindings of one graph in one plan.
struct Bindings {
    std::vector<Binding> inputs, outputs;
};

// The bindings of a bundle's graphs, from its manifest. positions: N, the positions in the noise input. least_width:
// the fewest rows of a window that the engine takes; narrower windows are padded at the end.
class BundleBindings {
   public:
    BundleBindings(const Manifest& manifest, std::int64_t positions, int least_width)
        : manifest_(manifest), positions_(positions), least_width_(least_width) {}

    // Buffers whose content no later pass needs: every pass writes them before it reads them.
    std::set<std::string> scratch() const;
    // The rows of a window in memory, with padding.
    int window(const Plan& plan) const { return std::max(plan.width(), least_width_); }
    // The trunk's bindings but for the KV cache. prefill: in buffers of prefill, with one logit row, which the host
    // writes.
    Bindings trunk(const Plan& plan, int batch, bool prefill = false) const;
    const Graph& tail_graph(const Plan& plan, Sampler sampler) const;
    // processed: it reads what the logits processors wrote.
    Bindings tail(const Plan& plan, Sampler sampler, int batch, bool processed = false) const;
    // Those of the logits processors before the tail of `plan`. num_biased: the length of their lists.
    Bindings processors(const Graph& graph, const Plan& plan, int batch, std::size_t num_biased) const;
    // Those of the log-probability graph, after the tail of `plan`.
    Bindings logprobs(const Plan& plan, int batch) const;

   private:
    using Constants = std::map<std::string, std::shared_ptr<const Bytes>>;
    using Sizes = std::map<std::string, std::int64_t>;

    Constants constants(const Plan& plan) const;
    // `tensor` with the padded width of its window, if an engine's tail has the window's ids as input or output.
    Tensor widened(const Tensor& tensor, const Plan& plan) const;
    Binding bind(const Tensor& tensor, const Sizes& sizes, const Plan& plan, const Constants& constants,
                 const std::string& scope = "") const;

    const Manifest& manifest_;
    std::int64_t positions_;
    int least_width_;
};

}  // namespace pass
