// The interface of `TextStream`, which turns tokens into text and finds stop strings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace pass {

class TextReader {
   public:
    virtual ~TextReader() = default;
    // Add the next token. Returns the text that becomes final. Sets `stop` to the stop string that
    // ends the text, if one does.
    virtual std::string read(std::int64_t token, std::optional<std::string>& stop) = 0;
    // The text that was held back as a possible stop string. Call it after the last token.
    virtual std::string flush() = 0;
};

}  // namespace pass
