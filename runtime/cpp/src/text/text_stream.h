// The text of one request, token by token: only whole characters, and nothing that may still become a stop string.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "text/text_reader.h"
#include "text/vocabulary.h"

namespace pass {

// Holds back the end of a text while it may still become a stop string. As pass_runtime.text.stream.StopFilter.
class StopFilter {
   public:
    explicit StopFilter(std::vector<std::string> stops);

    // Add `text`; returns the text that is final. `stop` is set to the stop string that is complete first, which is
    // left out.
    std::string push(std::string_view text, std::optional<std::string>& stop);
    // The text that was held back, to be called after the last `push`.
    std::string flush();

   private:
    std::vector<std::string> stops_;
    std::string held_;
};

// As pass_runtime.text.stream.TextStream. A stop string that is the name of a special token ends the text, too, though
// special tokens are left out of it.
class TextStream : public TextReader {
   public:
    TextStream(std::shared_ptr<const Vocabulary> vocabulary, const std::vector<std::string>& stop);

    std::string read(std::int64_t token, std::optional<std::string>& stop) override;
    std::string flush() override;

   private:
    std::shared_ptr<const Vocabulary> vocabulary_;
    StopFilter filter_;
    std::set<std::int64_t> special_;
    std::string bytes_;  // bytes that do not end with a whole character yet
};

}  // namespace pass
