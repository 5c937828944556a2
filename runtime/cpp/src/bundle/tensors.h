// Names, types and ranks of the tensors of a bundle's graphs. docs/bundle.md says what they hold.
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

// All tensors of graphs by name, except K/V. A name has the same type and rank in all graphs.
const std::map<std::string, TensorKind>& tensor_kinds();

// The input of the next pass that shares the memory of `output`, if there is one.
std::optional<std::string> fed_input(const std::string& output);

// An array of the draft head, in `head_file` from byte `offset` on: float16 (2 bytes) or float32.
struct HeadArray {
    std::string name;  // of the tails' initializer that has these values
    std::vector<std::int64_t> shape;
    std::int64_t item_bytes = 4, offset = 0, bytes = 0;
};

// The arrays of a draft head in the order of `head_file`, each from a multiple of 64 bytes on.
std::vector<HeadArray> head_arrays(const ModelInfo& model, const HeadInfo& head);

// A shape as messages show it, such as [batch,8,capacity,64].
std::string text_of(const std::vector<Dimension>& shape);

}  // namespace pass
