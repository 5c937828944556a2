// Prompt-lookup drafts: what followed the newest earlier occurrence of the sequence's last tokens (an n-gram).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace pass {

// Every n-gram of a growing token sequence, with the index after its newest occurrence.
class NgramIndex {
   public:
    void extend(std::span<const std::int64_t> tokens);

    // `count` tokens that followed the longest match, of equally long ones the newest; none if nothing matches.
    // If the match reaches the end of the sequence, the tokens since it are proposed again and again: a text that
    // loops.
    std::vector<std::int64_t> propose(int count) const;

    // The length of the present match in tokens, 0 if there is none.
    int matched() const { return matched_; }

   private:
    static constexpr int max_gram_tokens = 4, min_gram_tokens = 2;

    using Gram = std::array<std::int64_t, max_gram_tokens>;  // shorter ones are padded with -1, which is no token
    struct Hash {
        std::size_t operator()(const Gram& gram) const;
    };

    void index_end();

    std::vector<std::int64_t> tokens_;
    std::unordered_map<Gram, std::size_t, Hash> after_;
    std::size_t match_ = 0;  // the index after the newest earlier occurrence of the sequence's last tokens; 0: none
    int matched_ = 0;
};

}  // namespace pass
