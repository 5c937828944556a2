// The types, shapes and names of tensors, and which share memory; docs/bundle.md lists them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bundle/manifest.h"

namespace pass {

inline constexpr const char* cache_prefix = "past_";
inline constexpr const char* present_prefix = "present_";
inline constexpr const char* head_file = "tail.head.data";

// What a tensor of any graph must be.
struct TensorKind {
    std::string dtype;
    std::size_t rank = 0;  // the number of its dimensions
};

// By name, the tensors that graphs may have besides the KV cache.
const std::map<std::string, TensorKind>& tensor_kinds();

// The input of the next graph or pass that shares the memory of `output`; none if it feeds none.
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
