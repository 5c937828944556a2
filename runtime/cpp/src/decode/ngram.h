// N-gram drafts (prompt lookup): what followed the newest earlier occurrence of a sequence's last
// tokens.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace pass {

// Every n-gram of a growing token sequence, with the index of the token that followed its newest
// occurrence.
class NgramIndex {
   public:
    // Append `tokens`.
    void extend(std::span<const std::int64_t> tokens);

    // `count` tokens that followed the longest match, the newest one of that length; none without a
    // match. If the match is closer to the end than `count`, the tokens after it are repeated, as
    // in a text that loops.
    std::vector<std::int64_t> propose(int count) const;

    // The length of the present match in tokens, 0 for none.
    int matched() const { return matched_; }

   private:
    static constexpr int max_gram_tokens = 4, min_gram_tokens = 2;

    // shorter ones are padded with -1, which is no token
    using Gram = std::array<std::int64_t, max_gram_tokens>;
    struct Hash {
        std::size_t operator()(const Gram& gram) const;
    };

    // Index the n-grams that end the sequence, and look up where the longest of them ended before.
    void index_end();

    std::vector<std::int64_t> tokens_;
    std::unordered_map<Gram, std::size_t, Hash> following_;
    // the index after the newest earlier occurrence of the last tokens; 0 for none
    std::size_t match_ = 0;
    int matched_ = 0;  // how many tokens match
};

}  // namespace pass
