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
    std::thread::id first;
    thread.run([&] { first = std::this_thread::get_id(); });
    CHECK(first != std::this_thread::get_id());
    int others = 0, done = 0;  // only the one thread changes them, so they need no lock
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&] {
            for (int i = 0; i < 100; ++i) {
                thread.run([&] {
                    others += std::this_thread::get_id() == first ? 0 : 1;
                    done += 1;
                });
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    thread.run([&] { thread.run([&] { done += 1; }); });  // a task may run another one
    CHECK(others == 0);
    CHECK(done == 401);
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
    std::atomic<int> held = 0;
    std::thread::id inside, made, released;
    {
        OneThread thread([&]() -> std::shared_ptr<void> {
            made = std::this_thread::get_id();
            held += 1;
            return {nullptr, [&](void*) {
                        released = std::this_thread::get_id();
                        held -= 1;
                    }};
        });
        thread.run([&] {
            inside = std::this_thread::get_id();
            CHECK(held == 1);
        });
    }
    CHECK(held == 0);
    CHECK(made == inside);
    CHECK(released == inside);
}
