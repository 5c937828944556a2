#pragma once

#include <cstdint>
#include <vector>

namespace pass {

using Drafts = std::vector<std::int64_t>;

// Of n-grams. confidence: 0 to 5, see docs/decoding.md.
struct CopiedDrafts {
    Drafts tokens;
    int confidence = 0;
};

}  // namespace pass
