// The buffer that each tensor of a graph is bound to.
//
// Tensors with the same buffer and shape share memory, so data flows between graphs and passes: the
// trunk's output `logits` is the tail's input, and a tail's output `next_ids` is the next pass's
// input `input_ids` (`fed_input`).
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

const char* name_of(Sampler sampler);

using Bytes = std::vector<std::uint8_t>;

// The buffer of a tensor. by_slot: whether the buffer has a row for every slot; a pass over b slots
// is bound to the first b rows. row: the shape of such a row: `shape` without its first size. If
// the tensor has padding, the row is smaller, and the padding lies in the rows of the next slots.
// constant: what the buffer always holds; null if the host or a graph writes it.
struct Binding {
    std::string tensor;
    std::string buffer;
    std::vector<std::int64_t> shape;
    std::string dtype;
    bool by_slot = true;
    std::vector<std::int64_t> row;
    std::shared_ptr<const Bytes> constant;
};

// The bindings of one graph for passes of one plan.
struct Bindings {
    std::vector<Binding> inputs, outputs;
};

// The bindings of a bundle's graphs, from its manifest. positions: how many positions the tails'
// noise inputs list. least_width: the fewest window rows that the engine runs; narrower windows are
// padded at their end, in memory too. least_rows: the fewest rows, of all slots together, that the
// trunk runs; no other graph reads their padding.
class BundleBindings {
   public:
    BundleBindings(const Manifest& manifest, std::int64_t positions, int least_width,
                   int least_rows)
        : manifest_(manifest),
          positions_(positions),
          least_width_(least_width),
          least_rows_(least_rows) {}

    // Buffers whose content is not needed after the pass that wrote it.
    std::set<std::string> transient() const;
    // The rows of a window in memory, which are at least `least_width`.
    int padded_width(const Plan& plan) const { return std::max(plan.width(), least_width_); }
    // The rows of each slot's window in a pass of the trunk over `batch` slots.
    int trunk_width(const Plan& plan, int batch) const {
        return std::max(padded_width(plan), (least_rows_ + batch - 1) / batch);
    }
    // The bindings of the trunk, without the KV cache. prefill: use separate buffers, and compute
    // the logits of the one row whose number the host writes.
    Bindings trunk(const Plan& plan, int batch, bool prefill = false) const;
    // Throws Error if the bundle has no such tail.
    const Graph& tail_graph(const Plan& plan, Sampler sampler) const;
    // The bindings of the tail of `plan`. processed: whether it reads the processors' logits.
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

    Constants constants(const Plan& plan) const;
    // `tensor` as in memory: the width of a window's ids, if a number, becomes the padded width.
    Tensor padded(const Tensor& tensor, const Plan& plan) const;
    // As for `bind_graph`.
    Binding bind(const Tensor& tensor, const Sizes& sizes, const Plan& plan,
                 const Constants& constants, const std::string& scope, const Sizes& unpadded) const;
    // The bindings of `graph`, without the KV cache. constants: of its inputs, by name. scope:
    // prefix of the buffers. unpadded: `sizes` without the trunk's padding; null if there is none.
    Bindings bind_graph(const Graph& graph, const Sizes& sizes, const Plan& plan,
                        const Constants& constants, const std::string& scope = "",
                        const Sizes* unpadded = nullptr) const;

    const Manifest& manifest_;
    std::int64_t positions_;
    int least_width_, least_rows_;
};

}  // namespace pass
