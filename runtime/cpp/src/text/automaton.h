// Finds words in a growing text, with work that depends neither on their number nor on their length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace pass {

// Aho's and Corasick's (1975), over bytes. A state stands for the longest end of the text with which a word begins; 0
// for none. As pass_runtime.text.stream.
class Automaton {
   public:
    // words: none of them empty.
    explicit Automaton(const std::vector<std::string>& words);

    // The state with `byte` at the end. Over a whole text this looks up two bytes at most for each.
    std::uint32_t step(std::uint32_t state, char byte) const;
    // How many bytes the end of the text has that `state` stands for.
    std::size_t depth(std::uint32_t state) const { return nodes_[state].depth; }
    // The size of the longest word that the text ends with; 0 where it ends with none.
    std::size_t found(std::uint32_t state) const { return nodes_[state].found; }

   private:
    struct Node {
        std::size_t depth = 0, found = 0;
        std::uint32_t shorter = 0;  // the next shorter end with which a word begins
    };
    static std::uint64_t edge(std::uint32_t state, char byte) {
        return std::uint64_t{state} << 8 | static_cast<unsigned char>(byte);
    }

    std::vector<Node> nodes_{1};
    std::unordered_map<std::uint64_t, std::uint32_t> next_;  // by edge
};

}  // namespace pass
