// A thread of its own for the work of a device whose captured graphs belong to the thread that captured them.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

namespace pass {

// Runs tasks one after another. The thread ends with this object, after the tasks that it was given.
class OneThread {
   public:
    // context: makes what the thread holds for as long as it runs, such as `Memory::for_this_thread`.
    explicit OneThread(std::function<std::shared_ptr<void>()> context);
    ~OneThread();
    OneThread(const OneThread&) = delete;
    OneThread& operator=(const OneThread&) = delete;

    // Returns when `task` is done, and throws what it throws. Any thread may call it, and a task too.
    void run(const std::function<void()>& task);

   private:
    void work();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::packaged_task<void()>> tasks_;
    bool ending_ = false;
    std::thread thread_;  // the last one, because it uses the others
};

}  // namespace pass
