// The types and shapes of the tensors of tails, by name; docs/bundle.md lists them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "bundle/manifest.h"
#include "bundle/plan.h"

namespace pass {

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

}  // namespace pass
