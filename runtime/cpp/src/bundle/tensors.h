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

struct TensorKind {
    std::string dtype;
    std::size_t rank = 0;  // the number of its dimensions
};

// All tensors of graphs by name, except K/V. A name has the same type and rank in all graphs.
const std::map<std::string, TensorKind>& tensor_kinds();

// The input of the next pass that shares the memory of `output`, if there is one.
std::optional<std::string> fed_input(const std::string& output);

// A shape as messages show it, such as [batch,8,capacity,64].
std::string text_of(const std::vector<Dimension>& shape);

}  // namespace pass
