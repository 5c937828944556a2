// The one exception for what the caller can mend.
#pragma once

#include <stdexcept>
#include <string>

#include <pass/export.h>

namespace pass {

// The message is one line and says what to do next; it is the one of the Python runtime.
class PASS_API Error : public std::runtime_error {
   public:
    explicit Error(const std::string& message) : std::runtime_error(message) {}
};

// More requests wait than the session was opened for.
class PASS_API QueueFull : public Error {
   public:
    using Error::Error;
};

}  // namespace pass
