// Turns tokens into text, and finds stop strings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace pass {

class TextReader {
   public:
    virtual ~TextReader() = default;
    // Returns the text that becomes final. Sets `stop` to the stop string that ends the text.
    virtual std::string read(std::int64_t token, std::optional<std::string>& stop) = 0;
    // The text that was held back as a possible stop string.
    virtual std::string flush() = 0;
};

}  // namespace pass
