// Messages of the library and its engines, besides results and errors.
#pragma once

#include <functional>
#include <string>

#include "pass/export.h"

namespace pass {

enum class LogLevel { verbose, info, warning, error };

using LogFunction = std::function<void(LogLevel level, const std::string& message)>;

// Give all messages of this process of at least `least` to `log`; without it, errors of the engines are written to
// standard error. Sessions that are open already may keep their level. `log` is called from any thread, of engines too,
// and several at once: it must not throw, and must not call the library. An empty function: standard error again.
PASS_API void set_log(LogFunction log, LogLevel least = LogLevel::warning);

}  // namespace pass
