// Writes the library's log messages to the function that `set_log` set.
#pragma once

#include "pass/log.hpp"

namespace pass {

// The lowest level that is written, so that callers need not make messages below it.
LogLevel log_level();

// Write `message` to that function, or to standard error if none is set, from `log_level()` up.
void log(LogLevel level, const std::string& message) noexcept;

}  // namespace pass
