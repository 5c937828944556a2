// The interface of `TextStream`, which turns tokens into text and finds stop strings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace pass {

class TextReader {
   public:
    virtual ~TextReader() = default;
    // The text that becomes final with `token`. If a stop string ends the text, sets `stop` to it.
    virtual std::string read(std::int64_t token, std::optional<std::string>& stop) = 0;
    // The text that was held back as a possible stop string, without an incomplete character. Call
    // it after the last token.
    virtual std::string flush() = 0;
};

}  // namespace pass
