#include "backends/one_thread.h"

#include <utility>

namespace pass {

OneThread::OneThread(std::function<std::shared_ptr<void>()> context)
    : thread_([this, context = std::move(context)] {
          const std::shared_ptr<void> held = context();
          work();
      }) {}

OneThread::~OneThread() {
    {
        const std::lock_guard lock(mutex_);
        ending_ = true;
    }
    changed_.notify_one();
    thread_.join();
}

void OneThread::run(const std::function<void()>& task) {
    if (std::this_thread::get_id() == thread_.get_id()) {
        task();
        return;
    }
    std::packaged_task<void()> given([&task] { task(); });
    std::future<void> done = given.get_future();
    {
        const std::lock_guard lock(mutex_);
        tasks_.push_back(std::move(given));
    }
    changed_.notify_one();
    done.get();
}

void OneThread::work() {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return ending_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        std::packaged_task<void()> task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        task();
        lock.lock();
    }
}

}  // namespace pass
