// Slots, rounds and turns, over a backend that recites.
#include "catch.hpp"

#include <chrono>
#include <cstdlib>
#include <thread>

#include "reciting.h"

using namespace pass;
using namespace pass::test;

TEST_CASE("every plan writes the same text", "[core]") {
    for (const std::string plan : {"ar", "two-pass", "fused", "fused:3,2,1,0", "auto"}) {
        for (const char* draft : {"", "ngram", "both"}) {
            if (plan == "ar" && *draft != '\0') continue;
            const auto core = reciting_core(1);
            Request asked = request(5, 100, plan);
            if (*draft != '\0') asked.options.draft = draft;
            const auto sequence = core->submit(asked, nullptr);
            INFO(plan << " " << draft);
            CHECK(read_all(*core, *sequence) == expected(5, 100));
            CHECK(sequence->mail.end->reason == FinishReason::length);
            CHECK((plan == "ar" || plan == "auto") == (sequence->stats.accepted == 0 || plan == "auto"));
        }
    }
}

TEST_CASE("a text ends where the cache does, in ever narrower windows", "[core]") {
    const auto core = reciting_core(1);
    const auto sequence = core->submit(request(250, 100), nullptr);
    CHECK(read_all(*core, *sequence) == expected(250, 7));  // the last one needs no place in the cache
    CHECK(sequence->mail.end->reason == FinishReason::length);
}

TEST_CASE("requests that cannot be are refused in one line", "[core]") {
    const auto core = reciting_core(1);
    const auto refusal = [&](Request asked) {
        try {
            core->submit(asked, nullptr);
        } catch (const Error& error) {
            return std::string(error.what());
        }
        return std::string("none");
    };
    Request asked = request(1, 1);
    asked.prompt_ids = {};
    CHECK(refusal(asked) == "the prompt has no tokens");
    asked.prompt_ids = {50};
    CHECK(refusal(asked) == "token id 50 is not in the vocabulary of 50");
    CHECK(refusal(request(257, 1)) == "the prompt has 257 tokens, more than the KV capacity of 256; shorten it");
    CHECK(refusal(request(1, 0)) == "max-new-tokens must be at least 1, not 0");
    CHECK(refusal(request(1, 1, "fused:5,5,5,5,5,5")) ==
          "fused:5,5,5,5,5,5 has more drafts than the 4 the bundle was exported with");
    CHECK(refusal(request(1, 1, "quick")) ==
          "unknown plan 'quick': choose one of ar, two-pass, fused, or fused:4,3,2,2,1 and the like");
    asked = request(1, 1);
    asked.options.sampling.temperature = -1;
    CHECK(refusal(asked) == "temperature must be a number of at least 0, not -1.0");
}

TEST_CASE("a full queue refuses", "[core]") {
    const auto core = reciting_core(1, nullptr, nullptr, 1);
    const auto first = core->submit(request(3, 4), nullptr);
    CHECK_THROWS_AS(core->submit(request(3, 4), nullptr), QueueFull);
    CHECK(read_all(*core, *first) == expected(3, 4));
}

TEST_CASE("cancelling and closing", "[core]") {
    const auto core = reciting_core(2);
    const auto first = core->submit(request(3, 100), nullptr);
    const auto second = core->submit(request(4, 100), nullptr);
    core->step();
    first->cancelled = true;
    const auto read = read_all(*core, *first);
    CHECK(read.size() < 100);
    CHECK(first->mail.end->reason == FinishReason::cancelled);
    core->close();
    read_all(*core, *second);
    CHECK(second->mail.end->reason == FinishReason::cancelled);
    CHECK_THROWS_WITH(core->submit(request(3, 1), nullptr), "this session is closed; load the bundle again");
    core->close();
}

TEST_CASE("what fails ends the sequences of its pass, and the next ones are decoded", "[core]") {
    RecitingBackend* backend = nullptr;
    const auto core = reciting_core(2, &backend);
    const auto first = core->submit(request(3, 50), nullptr);
    const auto second = core->submit(request(4, 50), nullptr);
    int passes = 0;
    backend->before_pass = [&] {
        if (++passes == 3) throw Error("the pass failed");
    };
    CHECK_THROWS_WITH(read_all(*core, *first), "the pass failed");
    CHECK_THROWS_WITH(read_all(*core, *second), "the pass failed");
    const auto third = core->submit(request(5, 50), nullptr);
    CHECK(read_all(*core, *third) == expected(5, 50));
}

namespace {

// The heap, which refuses from now on where it is told to.
class Limited : public Allocator {
   public:
    void* allocate(std::size_t size) noexcept override { return refuse ? nullptr : std::malloc(size); }
    void free(void* block) noexcept override { std::free(block); }
    bool refuse = false;
};

}  // namespace

TEST_CASE("where memory runs out the longest sequence ends, and the others go on", "[core]") {
    const auto heap = std::make_shared<Limited>();
    const auto core = reciting_core(2, nullptr, heap);
    const auto longer = core->submit(request(40, 100, "ar"), nullptr);
    const auto shorter = core->submit(request(4, 20, "ar"), nullptr);
    for (int round = 0; round < 8; ++round) core->step();  // both are past their prompts
    heap->refuse = true;
    CHECK_THROWS_WITH(read_all(*core, *longer), Catch::Contains("there is no memory"));
    CHECK(read_all(*core, *shorter) == expected(4, 20));
}

namespace {

using std::chrono::milliseconds;

// Text that takes its time.
class SlowReader : public TextReader {
   public:
    std::string read(std::int64_t, std::optional<std::string>&) override {
        std::this_thread::sleep_for(milliseconds(1));
        return "";
    }
    std::string flush() override { return ""; }
};

}  // namespace

TEST_CASE("decoding time is the engine's, a neighbour's prompt included, or the host's", "[core]") {
    RecitingBackend* backend = nullptr;
    const auto core = reciting_core(2, &backend);
    backend->before_pass = [] { std::this_thread::sleep_for(milliseconds(2)); };
    backend->before_prompt = [] { std::this_thread::sleep_for(milliseconds(10)); };
    const auto first = core->submit(request(1, 20, "ar"), std::make_unique<SlowReader>());
    core->step();
    const auto second = core->submit(request(129, 20, "ar"), std::make_unique<SlowReader>());
    read_all(*core, *first);
    read_all(*core, *second);
    CHECK(first->stats.passes == 20);
    CHECK(first->stats.engine_seconds >= 20 * 0.002 + 2 * 0.010);  // 128 tokens in chunks of 64
    CHECK(first->stats.host_seconds() >= 20 * 0.001);
    CHECK(second->stats.engine_seconds >= 20 * 0.002);
    CHECK(second->stats.host_seconds() >= 20 * 0.001);
}

TEST_CASE("many threads submit, read and cancel at once", "[core]") {
    const auto core = reciting_core(3);
    std::vector<std::thread> threads;
    std::atomic<int> wrong = 0;
    for (int number = 0; number < 4; ++number) {
        threads.emplace_back([&, number] {
            for (int i = 0; i < 25; ++i) {
                const std::size_t prompt = static_cast<std::size_t>(1 + (number * 7 + i) % 30);
                const auto sequence = core->submit(request(prompt, 20 + i, i % 2 == 0 ? "fused" : "two-pass"), nullptr);
                if (i % 5 == 4) sequence->cancelled = true;
                const auto read = read_all(*core, *sequence);
                const auto whole = expected(prompt, 20 + i);
                const bool is_prefix =
                    read.size() <= whole.size() && std::equal(read.begin(), read.end(), whole.begin());
                if (!is_prefix || (i % 5 != 4 && read.size() != whole.size())) ++wrong;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK_FALSE(core->step());
}
