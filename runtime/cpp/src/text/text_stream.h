// The text of one request, token by token: only whole characters, and nothing that may still become a stop string.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "text/stop_filter.h"
#include "text/text_reader.h"
#include "text/vocabulary.h"

namespace pass {

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
