#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace pass {

// N-gram drafts (prompt lookup). The match is the longest n-gram that ends the sequence and
// occurred in it before.
class NgramIndex {
   public:
    void extend(std::span<const std::int64_t> tokens);

    // The tokens that followed the last earlier occurrence of the match; empty without one. If too
    // few follow, they are repeated, as in a text that loops.
    std::vector<std::int64_t> propose(int count) const;

    // In tokens; 0 without a match.
    int match_length() const { return match_length_; }

   private:
    static constexpr int max_gram_tokens = 4, min_gram_tokens = 2;

    // Shorter n-grams are padded with -1, which is no token.
    using Gram = std::array<std::int64_t, max_gram_tokens>;

    void index_end();

    std::vector<std::int64_t> tokens_;
    std::map<Gram, std::size_t> following_;  // index after the last occurrence
    std::size_t after_match_ = 0;  // index after the match's last earlier occurrence; 0: no match
    int match_length_ = 0;         // in tokens
};

}  // namespace pass
