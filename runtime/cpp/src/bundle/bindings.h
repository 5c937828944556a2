// Chooses the buffer that every tensor of a graph is bound to, for any engine.
//
// Data flows between graphs and passes in buffers: tensors with the same buffer name and shape
// share memory. The trunk's output `logits` is the tail's input, and a tail's output `next_ids` is
// the input `input_ids` of the next pass (see `fed_input`).
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

// An input that only trunks for TensorRT have: its length says how many cache entries a pass reads.
inline constexpr const char* columns_input = "columns";
// Prefix of the buffers that only prefill uses, so that prefill changes no slot's window.
inline constexpr const char* prefill_scope = "prefill.";

// The name that a manifest has for `sampler`.
const char* name_of(Sampler sampler);

using Bytes = std::vector<std::uint8_t>;

// The buffer, shape and dtype of a tensor. by_slot: whether the buffer has a row for every slot; a
// pass over b slots is bound to the first b rows. constant: what the buffer always holds; null if
// the host or a graph writes it.
struct Binding {
    std::string tensor;
    std::string buffer;
    std::vector<std::int64_t> shape;
    std::string dtype;
    bool by_slot = true;
    std::shared_ptr<const Bytes> constant;
};

// The bindings of one graph for passes of one plan.
struct Bindings {
    std::vector<Binding> inputs, outputs;
};

// The bindings of a bundle's graphs, from its manifest. positions: N, the number of positions that
// the tails' noise inputs list. least_width: the fewest rows of a window that the engine runs;
// narrower windows are padded at their end, and so are their buffers.
class BundleBindings {
   public:
    BundleBindings(const Manifest& manifest, std::int64_t positions, int least_width)
        : manifest_(manifest), positions_(positions), least_width_(least_width) {}

    // Buffers whose content is not needed after the pass that wrote it.
    std::set<std::string> transient() const;
    // The rows of a window in its buffers: at least `least_width`.
    int padded_width(const Plan& plan) const { return std::max(plan.width(), least_width_); }
    // The bindings of the trunk, without the KV cache. prefill: use the buffers of prefill, and
    // compute the logits of a single row, which the host chooses.
    Bindings trunk(const Plan& plan, int batch, bool prefill = false) const;
    // The tail that follows the trunk in a pass of `plan`. Throws Error if the bundle has none.
    const Graph& tail_graph(const Plan& plan, Sampler sampler) const;
    // The bindings of that tail. processed: whether it reads the logits of the processors.
    Bindings tail(const Plan& plan, Sampler sampler, int batch, bool processed = false) const;
    // The bindings of the logits processors before the tail of `plan`. touched_count: the length of
    // their token lists, T of `ProcessedRows`.
    Bindings processors(const Graph& graph, const Plan& plan, int batch,
                        std::size_t touched_count) const;
    // The bindings of the graph of log-probabilities after the tail of `plan`.
    Bindings logprobs(const Plan& plan, int batch) const;

   private:
    using Constants = std::map<std::string, std::shared_ptr<const Bytes>>;
    using Sizes = std::map<std::string, std::int64_t>;

    // The inputs of the graphs of `plan` that are the same in every pass, by name.
    Constants constants(const Plan& plan) const;
    // `tensor` as its buffer has it: with the padded width if it holds a window's ids.
    Tensor padded(const Tensor& tensor, const Plan& plan) const;
    // The binding of `tensor`. The parameters are those of `bind_graph`.
    Binding bind(const Tensor& tensor, const Sizes& sizes, const Plan& plan,
                 const Constants& constants, const std::string& scope) const;
    // The bindings of `graph`, without the KV cache. sizes: by symbolic dimension. constants: the
    // inputs that are bound to constants, by name. scope: a prefix of the buffers' names.
    Bindings bind_graph(const Graph& graph, const Sizes& sizes, const Plan& plan,
                        const Constants& constants, const std::string& scope = "") const;

    const Manifest& manifest_;
    std::int64_t positions_;
    int least_width_;
};

}  // namespace pass
