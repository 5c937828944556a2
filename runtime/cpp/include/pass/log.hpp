// Messages of the library and its engines.
#pragma once

#include <functional>
#include <string>

#include "pass/export.h"

namespace pass {

enum class LogLevel { verbose, info, warning, error };

using LogFunction = std::function<void(LogLevel level, const std::string& message)>;

// Give this process's messages of `level` and above to `log`. Until the first call, or if `log` is
// empty, only errors of the engines are written, to standard error. Sessions that are open already
// may keep their level. Several threads, also of engines, may call `log` at once. `log` must not
// throw, and must not call the library.
PASS_API void set_log(LogFunction log, LogLevel level = LogLevel::warning);

}  // namespace pass
