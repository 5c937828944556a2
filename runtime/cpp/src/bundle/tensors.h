// The types, shapes and names of tensors, and which share memory; docs/bundle.md lists them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bundle/manifest.h"
#include "bundle/plan.h"

namespace pass {

inline constexpr const char* cache_prefix = "past_";
inline constexpr const char* present_prefix = "present_";
inline constexpr const char* head_file = "tail.head.data";

struct TensorKind {
    std::string dtype;
    std::vector<Dimension> shape;
};

using TensorKinds = std::map<std::string, TensorKind>;

// Every tensor that a tail of `plan` may have. A fused tail serves windows of any group sizes, so its widths are
// symbolic.
TensorKinds tail_tensors(const Plan& plan, std::int64_t vocab_size, std::int64_t hidden_size);

// The tensors of the log-probability graph.
TensorKinds logprobs_tensors(std::int64_t vocab_size);

// The tensors of the graph of logits processors.
TensorKinds processors_tensors(std::int64_t vocab_size);

// The input of the next graph or pass that shares the memory of `output`; none where it feeds none.
std::optional<std::string> fed_by(const std::string& output);

// An array in the draft head's file: float16 (item: 2 bytes) or float32, from byte `offset` on, a multiple of 64.
struct HeadArray {
    std::string name;  // in the graphs
    std::vector<std::int64_t> shape;
    std::int64_t item = 4, offset = 0, bytes = 0;
};

std::vector<HeadArray> head_arrays(const ModelInfo& model, const HeadInfo& head);

// A shape for messages: [batch,8,capacity,64].
std::string text_of(const std::vector<Dimension>& shape);

}  // namespace pass
