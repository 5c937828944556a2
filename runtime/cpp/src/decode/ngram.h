// N-gram drafts (prompt lookup): what followed the last earlier occurrence of the newest tokens.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace pass {

// Every n-gram of a growing sequence, with the index of the token after its newest occurrence. The
// match is the longest n-gram that ends the sequence and occurred in it before.
class NgramIndex {
   public:
    void extend(std::span<const std::int64_t> tokens);

    // The `count` tokens that followed the last earlier occurrence of the match; empty without one.
    // If fewer tokens follow, they are repeated, as in a text that loops.
    std::vector<std::int64_t> propose(int count) const;

    // The length of the match in tokens; 0 without a match.
    int match_length() const { return match_length_; }

   private:
    static constexpr int max_gram_tokens = 4, min_gram_tokens = 2;

    // Shorter n-grams are padded with -1, which is no token.
    using Gram = std::array<std::int64_t, max_gram_tokens>;
    struct Hash {
        std::size_t operator()(const Gram& gram) const;
    };

    // Index the n-grams that end the sequence, and find the match.
    void index_end();

    std::vector<std::int64_t> tokens_;
    std::unordered_map<Gram, std::size_t, Hash> following_;
    std::size_t after_match_ = 0;  // index after the match's last earlier occurrence; 0: no match
    int match_length_ = 0;         // in tokens
};

}  // namespace pass
