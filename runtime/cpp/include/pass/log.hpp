#pragma once

#include <functional>
#include <string>

#include "pass/export.h"

namespace pass {

enum class LogLevel { verbose, info, warning, error };

using LogFunction = std::function<void(LogLevel level, const std::string& message)>;

// Send all messages of this process of at least `level`, also those of ONNX Runtime and TensorRT,
// to `log`. Until then, or if `log` is empty, errors of the engines go to standard error. Sessions
// that are open may keep their former level. Several threads may call `log` at once. It must not
// throw, nor call the library.
PASS_API void set_log(LogFunction log, LogLevel level = LogLevel::warning);

}  // namespace pass
