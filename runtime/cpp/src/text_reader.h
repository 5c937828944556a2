// What turns tokens into text and finds stop strings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace pass {

class TextReader {
   public:
    virtual ~TextReader() = default;
    // Text that is final now. `stop` is set to the stop string that ended it, where one did.
    virtual std::string read(std::int64_t token, std::optional<std::string>& stop) = 0;
    // What was held back, once no more tokens come.
    virtual std::string flush() = 0;
};

}  // namespace pass
