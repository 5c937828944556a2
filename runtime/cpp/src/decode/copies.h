#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "backends/drafts.h"

namespace pass {

// Drafts copied from a text's own earlier tokens, as pass_runtime/decode/copies.py.
class CopyIndex {
   public:
    void extend(std::span<const std::int64_t> tokens);

    // Empty without a match. If too few tokens follow it, they are repeated, as in a loop.
    CopiedDrafts propose(int count);

   private:
    struct Hash {
        std::size_t operator()(const std::pair<std::int64_t, std::int64_t>& pair) const;
    };

    // In tokens, by the index after the match; the newest first, then the one in use.
    std::vector<std::pair<std::size_t, std::int64_t>> matches() const;
    std::int64_t match_length(std::size_t end) const;

    std::vector<std::int64_t> tokens_;
    // A pair of tokens -> the index after its newest occurrence.
    std::unordered_map<std::pair<std::int64_t, std::int64_t>, std::size_t, Hash> newest_;
    // By a pair's last index: the index after the pair's occurrence before, or 0.
    std::vector<std::size_t> previous_;
    std::size_t source_ = 0;  // the index of the token that continues the copy in use, or 0
};

}  // namespace pass
