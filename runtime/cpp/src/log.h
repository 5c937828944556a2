// Writes the library's log messages to the function that `set_log` set.
#pragma once

#include "pass/log.hpp"

namespace pass {

// The lowest level that is written: messages below it need not be made.
LogLevel log_level();

// Write `message` to that function, or else to standard error, unless it is below `log_level()`.
void log(LogLevel level, const std::string& message) noexcept;

}  // namespace pass
