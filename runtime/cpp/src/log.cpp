#include "log.h"

#include <cstdio>
#include <memory>
#include <mutex>

namespace pass {

namespace {

struct Sink {
    LogFunction write;
    LogLevel min_level;
};

std::mutex mutex;
// Null: standard error. The pointer is never destroyed, because engines log while a process exits.
auto& sink = *new std::shared_ptr<const Sink>;

std::shared_ptr<const Sink> current_sink() {
    const std::lock_guard lock(mutex);
    return sink;
}

}  // namespace

void set_log(LogFunction log, LogLevel level) {
    auto new_sink = log ? std::make_shared<const Sink>(Sink{std::move(log), level}) : nullptr;
    const std::lock_guard lock(mutex);
    sink.swap(new_sink);  // the old one is destroyed after the lock is released
}

LogLevel log_level() {
    const auto writer = current_sink();
    return writer != nullptr ? writer->min_level : LogLevel::error;
}

void log(LogLevel level, const std::string& message) noexcept {
    const auto writer = current_sink();
    if (level < (writer != nullptr ? writer->min_level : LogLevel::error)) return;
    if (writer != nullptr)
        writer->write(level, message);
    else
        std::fprintf(stderr, "pass: %s\n", message.c_str());
}

}  // namespace pass
