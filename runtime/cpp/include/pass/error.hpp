// The exceptions of libpass.
#pragma once

#include <stdexcept>
#include <string>

#include <pass/export.h>

namespace pass {

// An error that the caller can mend. Its message is one line that says what to do next.
class PASS_API Error : public std::runtime_error {
   public:
    explicit Error(const std::string& message) : std::runtime_error(message) {}
};

// A request was refused, because all slots are taken and LoadOptions::max_queue requests wait.
class PASS_API QueueFull : public Error {
   public:
    using Error::Error;
};

}  // namespace pass
