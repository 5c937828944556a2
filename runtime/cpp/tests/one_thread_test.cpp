// `OneThread` runs the tasks of all callers in one thread.
#include "backends/ort/bound_graph.h"

#include <atomic>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "catch.hpp"
#include "errors.h"

using namespace pass;

TEST_CASE("tasks of all callers run in one thread", "[thread]") {
    OneThread thread([] { return nullptr; });
    std::thread::id task_thread;
    thread.run([&] { task_thread = std::this_thread::get_id(); });
    CHECK(task_thread != std::this_thread::get_id());
    // Only tasks change these counters, so they need no lock.
    int tasks = 0, tasks_elsewhere = 0;
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&] {
            for (int i = 0; i < 100; ++i) {
                thread.run([&] {
                    tasks += 1;
                    tasks_elsewhere += std::this_thread::get_id() == task_thread ? 0 : 1;
                });
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    thread.run([&] { thread.run([&] { tasks += 1; }); });  // a task may run another task
    CHECK(tasks_elsewhere == 0);
    CHECK(tasks == 4 * 100 + 1);
}

TEST_CASE("what a task throws is thrown to its caller", "[thread]") {
    OneThread thread([] { return nullptr; });
    CHECK_THROWS_AS(thread.run([] { throw DeviceLost("it is lost"); }), DeviceLost);
    CHECK_THROWS_WITH(thread.run([&] { thread.run([] { throw std::logic_error("a bug"); }); }),
                      "a bug");
    bool ran = false;
    thread.run([&] { ran = true; });
    CHECK(ran);
}

TEST_CASE("the thread holds its context from its first task to its end", "[thread]") {
    std::atomic<int> contexts = 0;
    std::thread::id task_thread, made_in, released_in;
    {
        OneThread thread([&]() -> std::shared_ptr<void> {
            made_in = std::this_thread::get_id();
            contexts += 1;
            return {nullptr, [&](void*) {
                        released_in = std::this_thread::get_id();
                        contexts -= 1;
                    }};
        });
        thread.run([&] {
            task_thread = std::this_thread::get_id();
            CHECK(contexts == 1);
        });
    }
    CHECK(contexts == 0);
    CHECK(made_in == task_thread);
    CHECK(released_in == task_thread);
}
