#include "log.h"

#include <cstdio>
#include <memory>
#include <mutex>

namespace pass {

namespace {

struct Sink {
    LogFunction write;
    LogLevel least = LogLevel::error;
};

std::mutex mutex;
// Null writes to standard error. It is never destroyed, because engines log at exit.
auto& sink = *new std::shared_ptr<const Sink>;

std::shared_ptr<const Sink> current() {
    const std::lock_guard lock(mutex);
    return sink;
}

}  // namespace

void set_log(LogFunction log, LogLevel least) {
    auto made = log ? std::make_shared<const Sink>(Sink{std::move(log), least}) : nullptr;
    const std::lock_guard lock(mutex);
    sink.swap(made);
}

LogLevel log_level() {
    const auto to = current();
    return to != nullptr ? to->least : LogLevel::error;
}

void log(LogLevel level, const std::string& message) noexcept {
    const auto to = current();
    if (to != nullptr) {
        if (level >= to->least) to->write(level, message);
    } else if (level >= LogLevel::error) {
        std::fprintf(stderr, "pass: %s\n", message.c_str());
    }
}

}  // namespace pass
