// Drafts from the text itself: what followed the last time these tokens stood in a row (prompt look-up).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace pass {

// Every n-gram of a growing token sequence, with the place behind its newest occurrence.
class NgramIndex {
   public:
    void extend(std::span<const std::int64_t> tokens);

    // Up to `count` tokens that followed the longest, then newest, match; none where nothing matches. A match that runs
    // into the end of the sequence goes on with what it has proposed itself: a loop.
    std::vector<std::int64_t> propose(int count) const;

    // Tokens that agree in the present match, 0 where there is none.
    int matched() const { return matched_; }

   private:
    static constexpr int longest = 4, shortest = 2;

    using Gram = std::array<std::int64_t, longest>;  // behind a shorter one stands -1, which is no token
    struct Hash {
        std::size_t operator()(const Gram& gram) const;
    };

    void index_end();

    std::vector<std::int64_t> tokens_;
    std::unordered_map<Gram, std::size_t, Hash> behind_;
    std::size_t match_ = 0;  // the place behind the newest earlier occurrence of the sequence's own end; 0 is none
    int matched_ = 0;
};

}  // namespace pass
