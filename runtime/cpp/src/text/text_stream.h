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

// Finds words in a text as it grows: Aho and Corasick's automaton (1975), over bytes. A state
// stands for the longest suffix of the text that is the beginning of a word; state 0 for none. As
// pass_runtime.text.bad_words.Automaton.
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
        std::uint32_t shorter = 0;  // the state of the next shorter suffix that begins a word
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
    // the text: `stop` is set to that string, which is not returned. may_end: whether a stop string
    // that `text` completes ends the text.
    std::string push(std::string_view text, std::optional<std::string>& stop, bool may_end = true);
    // The text that was held back. Call it after the last `push`.
    std::string flush();

   private:
    Automaton automaton_;
    std::uint32_t state_ = 0;
    std::string held_;  // the text that was held back
};

// Turns tokens that follow a prompt into text. The first bytes of a character are held back until
// later tokens complete the character, or cannot. As pass_runtime.text.detokenizer.Detokenizer.
class Detokenizer {
   public:
    Detokenizer(std::shared_ptr<const Vocabulary> vocabulary,
                const std::vector<std::int64_t>& prompt);

    // Add the next token. Returns the text that becomes final.
    std::string push(std::int64_t token);

   private:
    // The bytes that `token` adds to the text.
    std::string bytes(std::int64_t token);
    // Add `bytes` to the end of `held_`. Returns the whole characters, which `held_` then lacks.
    std::string decode(std::string_view bytes);
    // Update `strips_left_`, and hold back the first bytes of a character that the prompt ends
    // within. Returns what the prompt's own text shows for these bytes: U+FFFD, or "".
    std::string read_prompt(const std::vector<std::int64_t>& prompt);

    std::shared_ptr<const Vocabulary> vocabulary_;
    std::size_t strips_left_;   // how many more spaces at the text's beginning are left out
    std::string held_;          // the first bytes of a character
    std::string shown_before_;  // what `read_prompt` returned; empty once there is text
};

// The text of one request, token by token. stop: strings that end the text and are not part of it.
// A stop string that is the name of a special token ends the text at that token, although special
// tokens are not shown. min_tokens: how many tokens are read before any can end the text. As
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
    std::map<std::int64_t, std::string> special_stops_;  // special token -> the stop string
    std::int64_t tokens_before_stop_;                    // how many more tokens cannot end the text
};

}  // namespace pass
