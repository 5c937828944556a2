// What the tensors of tails are, by name: see the tables of docs/bundle.md.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "manifest.h"
#include "plan.h"

namespace pass {

struct TensorKind {
    std::string dtype;
    std::vector<Dimension> shape;
};

using TensorKinds = std::map<std::string, TensorKind>;

// Every tensor that a tail of `plan` may have. Fused tails serve windows of any groups, so theirs are symbolic.
TensorKinds tail_tensors(const Plan& plan, std::int64_t vocab_size, std::int64_t hidden_size);

// Those of the graph of log-probabilities.
TensorKinds logprobs_tensors(std::int64_t vocab_size);

}  // namespace pass
