// Finds words in a growing text, with work that depends neither on their number nor on their length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/text_reader.h"
#include "text/vocabulary.h"

namespace pass {

// Aho's and Corasick's (1975), over bytes. A state stands for the longest end of the text with which a word begins; 0
// for none. As pass_runtime.text.automaton.
class Automaton {
   public:
    // words: none of them empty.
    explicit Automaton(const std::vector<std::string>& words);

    // The state with `byte` at the end. Over a whole text this looks up two bytes at most for each.
    std::uint32_t step(std::uint32_t state, char byte) const;
    // How many bytes the end of the text has that `state` stands for.
    std::size_t depth(std::uint32_t state) const { return nodes_[state].depth; }
    // The size of the longest word that the text ends with; 0 if it ends with none.
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

// Holds back the end of a text while it may still become a stop string. As pass_runtime.text.stream.StopFilter.
class StopFilter {
   public:
    explicit StopFilter(std::vector<std::string> stops);

    // Add `text`; returns the text that is final. `stop` is set to the stop string that is complete first, which is
    // left out. may_end: whether one that is complete within `text` counts.
    std::string push(std::string_view text, std::optional<std::string>& stop, bool may_end = true);
    // The text that was held back, to be called after the last `push`.
    std::string flush();

   private:
    Automaton automaton_;
    std::uint32_t state_ = 0;
    std::string held_;
};

// The text of tokens that follow a prompt. As pass_runtime.text.detokenizer.Detokenizer.
class Detokenizer {
   public:
    Detokenizer(std::shared_ptr<const Vocabulary> vocabulary, const std::vector<std::int64_t>& prompt);

    // The text that is certain with `token`.
    std::string push(std::int64_t token);

   private:
    std::string bytes(std::int64_t token);
    std::string decode(std::string_view more);
    std::string read_prompt(const std::vector<std::int64_t>& prompt);

    std::shared_ptr<const Vocabulary> vocabulary_;
    std::size_t strips_left_;   // how many spaces at the text's beginning are still left out
    std::string held_;          // the beginning of a character
    std::string shown_before_;  // what the prompt's own text shows in place of a character that it does not complete
};

// As pass_runtime.text.stream.TextStream. A stop string that is the name of a special token ends the text, too, though
// special tokens are left out of it. One that is complete within the first `min_tokens` tokens ends nothing.
class TextStream : public TextReader {
   public:
    TextStream(std::shared_ptr<const Vocabulary> vocabulary, const std::vector<std::string>& stop,
               const std::vector<std::int64_t>& prompt = {}, std::int64_t min_tokens = 0);

    std::string read(std::int64_t token, std::optional<std::string>& stop) override;
    std::string flush() override;

   private:
    std::shared_ptr<const Vocabulary> vocabulary_;
    StopFilter filter_;
    Detokenizer detokenizer_;
    std::set<std::int64_t> special_;
    std::int64_t too_early_;  // how many more tokens end nothing
};

}  // namespace pass
