// Errors that the caller can mend.
#pragma once

#include <stdexcept>
#include <string>

#include <pass/export.h>

namespace pass {

// The message is one line and says what to do next.
class PASS_API Error : public std::runtime_error {
   public:
    explicit Error(const std::string& message) : std::runtime_error(message) {}
};

// All slots are taken and the queue is full (LoadOptions::max_queue).
class PASS_API QueueFull : public Error {
   public:
    using Error::Error;
};

}  // namespace pass
