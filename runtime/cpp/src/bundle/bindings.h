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
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bundle/manifest.h"
#include "bundle/window.h"
#include "pass/options.hpp"

namespace pass {

// Prefixes of the names of the trunk's K/V inputs and outputs.
inline constexpr const char* cache_prefix = "past_";
inline constexpr const char* present_prefix = "present_";
// An input of trunks for TensorRT: its length says how many cache entries a pass reads.
inline constexpr const char* columns_input = "columns";
// Prefix of the buffers of prefill, which changes no slot's window.
inline constexpr const char* prefill_scope = "prefill.";

// The input of the next pass that shares the memory of `output`.
std::optional<std::string> fed_input(const std::string& output);

// The manifest's name of `sampler`.
const char* name_of(Sampler sampler);

using Bytes = std::vector<std::uint8_t>;

// by_slot: whether the buffer has a row for every slot; a pass over b slots is bound to the first b
// rows. constant: what the buffer always holds; null if the host or a graph writes it.
struct Binding {
    std::string tensor;
    std::string buffer;
    std::vector<std::int64_t> shape;
    std::string dtype;
    bool by_slot = true;
    std::shared_ptr<const Bytes> constant;
};

// The bindings of one graph for passes of one window.
struct Bindings {
    std::vector<Binding> inputs, outputs;
};

// The bindings of a bundle's graphs, without the KV cache. positions: N, how many positions the
// tails' noise inputs list. least_width: windows with fewer rows are padded, and so are their
// buffers.
class BundleBindings {
   public:
    BundleBindings(const Manifest& manifest, std::int64_t positions, int least_width)
        : manifest_(manifest), positions_(positions), least_width_(least_width) {}

    // Buffers whose content is not needed after the pass that wrote it.
    std::set<std::string> transient() const;
    int padded_width(const Window& window) const { return std::max(window.width(), least_width_); }
    // prefill: in the buffers of prefill, with the logits of a single row, which the host chooses.
    Bindings trunk(const Window& window, int batch, bool prefill = false) const;
    // The tail of a pass of `window`. Throws Error if the bundle has none.
    const Graph& tail_graph(const Window& window, Sampler sampler) const;
    // processed: whether the tail reads the logits of the processors.
    Bindings tail(const Window& window, Sampler sampler, int batch, bool processed = false) const;
    // touched_count: T of `ProcessedRows`.
    Bindings processors(const Window& window, int batch, std::size_t touched_count) const;
    Bindings logprobs(const Window& window, int batch) const;

   private:
    using Constants = std::map<std::string, std::shared_ptr<const Bytes>>;
    using Sizes = std::map<std::string, std::int64_t>;  // by symbolic dimension

    Constants constants(const Window& window) const;
    // `tensor` with the padded width if it holds a window's ids.
    Tensor padded(const Tensor& tensor, const Window& window) const;
    Binding bind(const Tensor& tensor, const Sizes& sizes, const Window& window,
                 const Constants& constants, const std::string& scope) const;
    // scope: a prefix of the buffers' names.
    Bindings bind_graph(const Graph& graph, const Sizes& sizes, const Window& window,
                        const Constants& constants, const std::string& scope = "") const;

    const Manifest& manifest_;
    std::int64_t positions_;
    int least_width_;
};

}  // namespace pass
