// Log messages of libpass and of its engines, ONNX Runtime and TensorRT.
#pragma once

#include <functional>
#include <string>

#include "pass/export.h"

namespace pass {

enum class LogLevel { verbose, info, warning, error };

using LogFunction = std::function<void(LogLevel level, const std::string& message)>;

// Send all messages of this process of at least `level` to `log`. Until the first call, or if `log`
// is empty, only errors of the engines are written, to standard error. The engines of sessions that
// are already open may keep their former level. Several threads, also those of engines, may call
// `log` at once. `log` must not throw, and must not call the library.
PASS_API void set_log(LogFunction log, LogLevel level = LogLevel::warning);

}  // namespace pass
