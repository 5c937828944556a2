// Messages for whoever called `set_log`.
#pragma once

#include "pass/log.hpp"

namespace pass {

// The lowest level that is written at present.
LogLevel log_level();

// Write `message` to the function of `set_log`, or to standard error, if `level` is high enough.
void log(LogLevel level, const std::string& message) noexcept;

}  // namespace pass
