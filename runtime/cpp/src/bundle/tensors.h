// Names, types and ranks of the tensors of a bundle's graphs, which docs/bundle.md explains.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bundle/manifest.h"

namespace pass {

// Prefixes of the names of the trunk's K/V inputs and outputs.
inline constexpr const char* cache_prefix = "past_";
inline constexpr const char* present_prefix = "present_";
inline constexpr const char* head_file = "tail.head.data";  // holds the draft head's arrays

struct TensorKind {
    std::string dtype;
    std::size_t rank = 0;  // the number of its dimensions
};

// The tensors of graphs, but the KV cache, by name. A name has one type and rank in all graphs.
const std::map<std::string, TensorKind>& tensor_kinds();

// The input of the next pass that shares the memory of `output`, if there is one.
std::optional<std::string> fed_input(const std::string& output);

// An array of float16 (item_bytes: 2) or float32 in the draft head's file, from byte `offset` on.
struct HeadArray {
    std::string name;  // in the tails
    std::vector<std::int64_t> shape;
    std::int64_t item_bytes = 4, offset = 0, bytes = 0;
};

// The arrays in their order in the file. Each begins at a multiple of 64 bytes.
std::vector<HeadArray> head_arrays(const ModelInfo& model, const HeadInfo& head);

// A shape for messages: [batch,8,capacity,64].
std::string text_of(const std::vector<Dimension>& shape);

}  // namespace pass
