// The text of one request, token by token: only whole characters, and nothing that may still become a stop string.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "text/automaton.h"
#include "text/text_reader.h"
#include "text/vocabulary.h"

namespace pass {

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
