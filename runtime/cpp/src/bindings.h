// Which buffer every tensor of a graph is bound to: what makes the loop's data flow.
//
// Tensors with the same buffer and shape are the same memory: the trunk's logits are the tail's, and outputs that the
// manifest's `feeds` names are the memory of the input that they feed, as `next_ids` is the next pass's `input_ids`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "manifest.h"
#include "pass/options.hpp"
#include "plan.h"

namespace pass {

inline constexpr const char* cache_prefix = "past_";
// An input that only a trunk for TensorRT has: its length says how many cache columns a pass reads.
inline constexpr const char* columns_input = "columns";
inline constexpr const char* present_prefix = "present_";
// Buffers of prefill, which works on one slot while the windows of the others stay.
inline constexpr const char* prefill_scope = "prefill.";

const char* name_of(Sampler sampler);

using Bytes = std::vector<std::uint8_t>;

// A tensor's place. by_slot: the buffer has a row for every slot, of which a pass over b slots is bound to the first b.
// constant: what the buffer holds, where it is not computed.
struct Binding {
    std::string tensor;
    std::string buffer;
    std::vector<std::int64_t> shape;
    std::string dtype;
    bool by_slot = true;
    std::shared_ptr<const Bytes> constant;
};

// Those of one graph in one plan.
struct Bindings {
    std::vector<Binding> inputs, outputs;
};

// The bindings of a bundle's graphs, from its manifest. `positions` is N, the listed ones. least_width: rows that an
// engine wants of a window at least; narrower ones have padding behind them.
class BundleBindings {
   public:
    BundleBindings(const Manifest& manifest, std::int64_t positions, int least_width)
        : manifest_(manifest), positions_(positions), least_width_(least_width) {}

    // Rows of a window as it lies in memory.
    int window(const Plan& plan) const { return std::max(plan.width(), least_width_); }
    // Of everything but the KV cache. prefill: a window of its own, with one logit row, which the host writes.
    Bindings trunk(const Plan& plan, int batch, bool prefill = false) const;
    const Graph& tail_graph(const Plan& plan, Sampler sampler) const;
    Bindings tail(const Plan& plan, Sampler sampler, int batch) const;
    // Of the graph of log-probabilities, after the tail of `plan`.
    Bindings logprobs(const Plan& plan, int batch) const;

   private:
    using Constants = std::map<std::string, std::shared_ptr<const Bytes>>;
    using Sizes = std::map<std::string, std::int64_t>;

    Constants constants(const Plan& plan) const;
    // A window of an engine's tail, where it lies padded in memory.
    Tensor widened(const Tensor& tensor, const Plan& plan) const;
    Binding bind(const Tensor& tensor, const Sizes& sizes, const Plan& plan, const Constants& constants,
                 const std::string& scope = "") const;

    const Manifest& manifest_;
    std::int64_t positions_;
    int least_width_;
};

}  // namespace pass
