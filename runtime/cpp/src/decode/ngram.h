// N-gram drafts (prompt lookup): what followed the last earlier occurrence of the newest tokens.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace pass {

// Every n-gram of a growing sequence, with the index of the token after its newest occurrence.
class NgramIndex {
   public:
    // Append `tokens`.
    void extend(std::span<const std::int64_t> tokens);

    // `count` tokens that followed the longest match (the newest of that length); empty without a
    // match. If fewer tokens follow the match, they are repeated, as in a text that loops.
    std::vector<std::int64_t> propose(int count) const;

    // The length of the present match in tokens, 0 for none.
    int match_length() const { return match_length_; }

   private:
    static constexpr int max_gram_tokens = 4, min_gram_tokens = 2;

    // Shorter n-grams are padded with -1, which is no token.
    using Gram = std::array<std::int64_t, max_gram_tokens>;
    struct Hash {
        std::size_t operator()(const Gram& gram) const;
    };

    // Index the n-grams that end the sequence, and find where the longest of them ended before.
    void index_end();

    std::vector<std::int64_t> tokens_;
    std::unordered_map<Gram, std::size_t, Hash> following_;
    std::size_t match_ = 0;  // the index after the match; 0 for none
    int match_length_ = 0;   // the length of the match in tokens
};

}  // namespace pass
