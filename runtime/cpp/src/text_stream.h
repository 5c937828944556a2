// The text of one request, token by token: no half characters, nothing that may still become a stop string.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "stop_filter.h"
#include "text_reader.h"
#include "vocabulary.h"

namespace pass {

// As pass_runtime.text.stream.TextStream. A stop string that a special token spells ends the text too, though special
// tokens are not shown.
class TextStream : public TextReader {
   public:
    TextStream(std::shared_ptr<const Vocabulary> vocabulary, const std::vector<std::string>& stop);

    std::string read(std::int64_t token, std::optional<std::string>& stop) override;
    std::string flush() override;

   private:
    std::shared_ptr<const Vocabulary> vocabulary_;
    StopFilter filter_;
    std::set<std::int64_t> special_;
    std::string bytes_;  // that do not end with a whole character yet
};

}  // namespace pass
