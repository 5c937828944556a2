// The text of one request, and the stop strings that end it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/text_reader.h"
#include "text/vocabulary.h"

namespace pass {

// Aho and Corasick's automaton (1975), over bytes. Its state stands for the longest suffix of the
// text with which a word begins; 0 for none. As pass_runtime.text.bad_words.Automaton.
class Automaton {
   public:
    // words: none of them empty.
    explicit Automaton(const std::vector<std::string>& words);

    // The state after one more byte. Over a whole text, this takes at most two look-ups a byte.
    std::uint32_t step(std::uint32_t state, char byte) const;
    // The length of the suffix that `state` stands for, in bytes.
    std::size_t depth(std::uint32_t state) const { return nodes_[state].depth; }
    // The length of the longest word that the text ends with, in bytes; 0 if there is none.
    std::size_t word_size(std::uint32_t state) const { return nodes_[state].word_size; }

   private:
    struct Node {
        std::size_t depth = 0, word_size = 0;
        std::uint32_t shorter = 0;  // the state of the next shorter such suffix
    };
    static std::uint64_t edge(std::uint32_t state, char byte) {
        return std::uint64_t{state} << 8 | static_cast<unsigned char>(byte);
    }

    std::vector<Node> nodes_{1};
    std::unordered_map<std::uint64_t, std::uint32_t> next_;  // by edge
};

// Holds back the end of the text while it may still grow into a stop string.
class StopFilter {
   public:
    explicit StopFilter(std::vector<std::string> stops);

    // Add `text`. Returns the text that becomes final. The stop string that is complete first ends
    // the text: `stop` is set to it, and it is not shown. may_end: false shows stop strings that
    // `text` completes like other text.
    std::string push(std::string_view text, std::optional<std::string>& stop, bool may_end = true);
    // The text that was held back. Call it after the last `push`.
    std::string flush();

   private:
    Automaton automaton_;
    std::uint32_t state_ = 0;
    std::string held_;
};

// The text of tokens that follow a prompt. The beginning of a character is held back until later
// tokens complete it, or cannot. As pass_runtime.text.detokenizer.Detokenizer.
class Detokenizer {
   public:
    Detokenizer(std::shared_ptr<const Vocabulary> vocabulary,
                const std::vector<std::int64_t>& prompt);

    // Add the next token. Returns the text that becomes final.
    std::string push(std::int64_t token);

   private:
    // The bytes that `token` adds to the text.
    std::string bytes(std::int64_t token);
    // Move `bytes` to the end of `held_`, and its whole characters out of it.
    std::string decode(std::string_view bytes);
    // Update `strips_left_`, and hold back the beginning of a character that the prompt ends with.
    // Returns what the prompt's own text shows in its place: U+FFFD, or "".
    std::string read_prompt(const std::vector<std::int64_t>& prompt);

    std::shared_ptr<const Vocabulary> vocabulary_;
    std::size_t strips_left_;   // how many more spaces at the text's beginning are left out
    std::string held_;          // the beginning of a character
    std::string shown_before_;  // what `read_prompt` returned, until there is text
};

// The text of one request, token by token. stop: strings that end the text and are not part of it.
// A stop string that is the text of a special token ends the text at that token, although special
// tokens are not shown. min_tokens: the first so many tokens do not end the text. As
// pass_runtime.text.detokenizer.TextStream.
class TextStream : public TextReader {
   public:
    TextStream(const std::shared_ptr<const Vocabulary>& vocabulary,
               const std::vector<std::string>& stop, const std::vector<std::int64_t>& prompt = {},
               std::int64_t min_tokens = 0);

    std::string read(std::int64_t token, std::optional<std::string>& stop) override;
    std::string flush() override;

   private:
    StopFilter filter_;
    Detokenizer detokenizer_;
    std::map<std::int64_t, std::string> special_stops_;  // stop strings of special tokens
    std::int64_t tokens_before_stop_;                    // so many more tokens do not end the text
};

}  // namespace pass
