// The text of one request, as in pass_runtime/text/detokenizer.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/text_reader.h"
#include "text/vocabulary.h"

namespace pass {

// Holds back the end of the text while it may still grow into a stop string.
class StopFilter {
   public:
    explicit StopFilter(std::vector<std::string> stops);

    // Returns the text that becomes final. The stop string that is complete first ends the text,
    // and `stop` is set to it. may_end: whether one that `text` completes ends it.
    std::string push(std::string_view text, std::optional<std::string>& stop, bool may_end = true);
    std::string flush();

   private:
    std::vector<std::string> stops_;  // the longest first
    std::string held_;
};

// Holds back the first bytes of a character until later tokens complete it, or cannot.
class Detokenizer {
   public:
    Detokenizer(std::shared_ptr<const Vocabulary> vocabulary,
                const std::vector<std::int64_t>& prompt);

    // Returns the text that becomes final.
    std::string push(std::int64_t token);

   private:
    std::string bytes(std::int64_t token);
    // Returns the whole characters of `held_` and `bytes`; `held_` keeps the rest.
    std::string decode(std::string_view bytes);
    // Holds back the first bytes of a character that the prompt ends within. Returns what the
    // prompt's own text shows for them.
    std::string read_prompt(const std::vector<std::int64_t>& prompt);

    std::shared_ptr<const Vocabulary> vocabulary_;
    std::size_t strips_left_;   // spaces at the text's beginning that are left out
    std::string held_;          // the first bytes of a character
    std::string shown_before_;  // from `read_prompt`; empty once there is text
};

// stop: strings that end the text and are not part of it; the name of a special token ends it at
// that token, although it is not shown. min_tokens: read before any can end the text.
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
    std::int64_t tokens_before_stop_;
};

}  // namespace pass
