#include "catch.hpp"

#include <chrono>
#include <cstdlib>
#include <functional>
#include <new>
#include <optional>
#include <stdexcept>
#include <thread>

#include "reciting.h"

using namespace pass;
using namespace pass::test;

TEST_CASE("every plan writes the same text", "[core]") {
    for (const std::string plan : {"ar", "two-pass", "fused", "fused:3,2,1,0", "auto"}) {
        for (const char* draft : {"", "ngram", "both"}) {
            if (plan == "ar" && *draft != '\0') continue;
            const auto core = reciting_core(1);
            Request sent = request(5, 100, plan);
            if (*draft != '\0') sent.options.draft = draft;
            const auto sequence = core->submit(sent, nullptr);
            INFO(plan << " " << draft);
            CHECK(read_all(*core, *sequence) == expected(5, 100));
            CHECK(sequence->output.end->reason == FinishReason::length);
            if (plan == "ar") CHECK(sequence->stats.accepted == 0);
            if (plan != "ar" && plan != "auto") CHECK(sequence->stats.accepted > 0);
        }
    }
}

TEST_CASE("windows get narrower where the cache ends, and fill it", "[core]") {
    const auto core = reciting_core(1);
    const auto sequence = core->submit(request(250, 100), nullptr);
    // The cache has 256 entries, and the last token needs none.
    CHECK(read_all(*core, *sequence) == expected(250, 7));
    CHECK(sequence->output.end->reason == FinishReason::length);
}

TEST_CASE("texts fill the capacity after prompts of almost its length", "[core]") {
    for (const std::int64_t capacity : {4, 8, 12, 16, 32, 64}) {
        for (const int slots : {1, 2, 3}) {
            const auto core = reciting_core(slots, nullptr, nullptr, 1024, capacity);
            const auto submit = [&](std::int64_t prompt_length, const std::string& plan,
                                    const char* draft) {
                Request sent = request(static_cast<std::size_t>(prompt_length), 1000, plan);
                if (*draft != '\0') sent.options.draft = draft;
                return core->submit(sent, nullptr);
            };
            const std::vector<std::string> plans{"ar", "two-pass", "fused", "fused:3,2,1,0",
                                                 "auto"};
            for (std::int64_t left = 3; left >= 0; --left) {
                for (const std::string& plan : plans) {
                    for (const char* draft : {"", "ngram", "both"}) {
                        if (plan == "ar" && *draft != '\0') continue;
                        INFO(capacity << " " << slots << " " << left << " " << plan << " "
                                      << draft);
                        // The second of several prompts is short.
                        std::vector<std::pair<std::int64_t, std::shared_ptr<SequenceState>>> batch;
                        for (int i = 0; i < slots; ++i) {
                            const std::int64_t prompt_length =
                                i == 1 ? 1 : std::max<std::int64_t>(capacity - left, 1);
                            batch.emplace_back(prompt_length, submit(prompt_length, plan, draft));
                        }
                        for (const auto& [prompt_length, sequence] : batch) {
                            CHECK(read_all(*core, *sequence) ==
                                  expected(static_cast<std::size_t>(prompt_length),
                                           capacity - prompt_length + 1));
                            CHECK(sequence->output.end->reason == FinishReason::length);
                        }
                    }
                }
            }
        }
    }
}

TEST_CASE("passes are timed once, and only when there is room for all of them", "[core]") {
    RecitingBackend* backend = nullptr;
    const auto core = reciting_core(1, &backend);
    std::int64_t passes = 0;
    backend->before_pass = [&] { ++passes; };
    // How many passes ran beside those that wrote the text, which fills the capacity of 256.
    const auto timed_passes = [&](std::size_t prompt_length) {
        passes = 0;
        const auto sequence = core->submit(request(prompt_length, 1000, "auto"), nullptr);
        CHECK(read_all(*core, *sequence) ==
              expected(prompt_length, 257 - static_cast<std::int64_t>(prompt_length)));
        return passes - sequence->stats.passes;
    };
    for (const std::size_t prompt_length : {256U, 255U, 250U, 240U}) {
        INFO(prompt_length);
        CHECK(timed_passes(prompt_length) == 0);
    }
    CHECK(timed_passes(5) >= 12);  // there is room: six windows run at least twice each
    CHECK(timed_passes(5) == 0);
    CHECK(timed_passes(256) == 0);
}

TEST_CASE("wrong requests are refused in one line", "[core]") {
    const auto core = reciting_core(1);
    const auto refusal = [&](Request sent) {
        try {
            core->submit(sent, nullptr);
        } catch (const Error& error) {
            return std::string(error.what());
        }
        return std::string("none");
    };
    Request sent = request(1, 1);
    sent.prompt_ids = {};
    CHECK(refusal(sent) == "the prompt has no tokens");
    sent.prompt_ids = {50};
    CHECK(refusal(sent) == "token id 50 is not in the vocabulary of 50");
    CHECK(refusal(request(257, 1)) ==
          "the prompt has 257 tokens, more than the KV capacity of 256; shorten it");
    CHECK(refusal(request(1, 0)) == "max-new-tokens must be at least 1, not 0");
    CHECK(refusal(request(1, 1, "fused:5,5,5,5,5,5")) ==
          "fused:5,5,5,5,5,5 has more drafts than the bundle's 4; use --plan fused");
    CHECK(refusal(request(1, 1, "quick")) ==
          "unknown plan 'quick': choose one of ar, two-pass, fused, auto, or group sizes as in "
          "fused:4,3,2,2,1");
    sent = request(1, 1);
    sent.options.sampling.temperature = -1;
    CHECK(refusal(sent) == "temperature must be a number of at least 0, not -1.0");
}

TEST_CASE("above speculative_max_concurrency, all sequences decode without drafts", "[core]") {
    for (const std::int64_t limit : {0, 1, 2}) {
        LoadOptions options;
        options.speculative_max_concurrency = limit;
        RecitingBackend* backend = nullptr;
        const auto core = reciting_core(2, &backend, nullptr, 1024, 256, options);
        std::int64_t passes = 0;
        backend->before_pass = [&] { ++passes; };
        for (const std::string plan : {"ar", "two-pass", "fused", "auto"}) {
            for (const char* draft : {"lookahead", "ngram", "both"}) {
                if (plan == "ar" && std::string(draft) != "lookahead") continue;
                INFO(limit << " " << plan << " " << draft);
                Request sent = request(1, 60, plan);
                sent.options.draft = draft;
                passes = 0;
                const auto first = core->submit(sent, nullptr),
                           second = core->submit(sent, nullptr);
                CHECK(read_all(*core, *first) == expected(1, 60));
                CHECK(read_all(*core, *second) == expected(1, 60));
                if (limit < 2) CHECK(passes == 60);  // both end at once; `auto` times no passes
                if (limit < 2) CHECK(first->stats.drafted == 0);
                if (limit == 2 && plan != "ar" && plan != "auto") CHECK(first->stats.accepted > 0);
                const auto alone = core->submit(sent, nullptr);
                CHECK(read_all(*core, *alone) == expected(1, 60));
                if (limit == 0) CHECK(alone->stats.drafted == 0);
                if (limit > 0 && plan != "ar" && plan != "auto") CHECK(alone->stats.accepted > 0);
            }
        }
    }
    LoadOptions wrong;
    wrong.speculative_max_concurrency = -1;
    CHECK_THROWS_WITH(wrong.check(), "speculative-max-concurrency must be at least 0, not -1");
}

TEST_CASE("a full queue refuses requests", "[core]") {
    const auto core = reciting_core(1, nullptr, nullptr, 1);
    const auto first = core->submit(request(3, 4), nullptr),
               second = core->submit(request(3, 4), nullptr);
    CHECK_THROWS_WITH(core->submit(request(3, 4), nullptr),
                      Catch::Contains("1 requests are waiting already"));
    CHECK_THROWS_AS(core->submit(request(3, 4), nullptr), QueueFull);
    CHECK(read_all(*core, *first) == expected(3, 4));
    const auto third = core->submit(request(3, 4), nullptr);  // the first has made room
    CHECK_THROWS_AS(core->submit(request(3, 4), nullptr), QueueFull);
    third->cancelled = true;  // takes effect in the next step
    CHECK_THROWS_AS(core->submit(request(3, 4), nullptr), QueueFull);
    core->step();
    const auto fourth = core->submit(request(3, 4), nullptr);
    CHECK(read_all(*core, *second) == expected(3, 4));
    CHECK(read_all(*core, *fourth) == expected(3, 4));
}

TEST_CASE("cancelling a request or closing the session ends it", "[core]") {
    const auto core = reciting_core(2);
    const auto first = core->submit(request(3, 100), nullptr);
    const auto second = core->submit(request(4, 100), nullptr);
    core->step();
    first->cancelled = true;
    const auto read = read_all(*core, *first);
    CHECK(read.size() < 100);
    CHECK(first->output.end->reason == FinishReason::cancelled);
    core->close();
    read_all(*core, *second);
    CHECK(second->output.end->reason == FinishReason::cancelled);
    CHECK_THROWS_WITH(core->submit(request(3, 1), nullptr),
                      "this session is closed; load the bundle again");
    core->close();
}

TEST_CASE("generations that outlive their session fail", "[core]") {
    const auto core = reciting_core(2);
    std::optional<Session> session(std::in_place, core);
    Generation begun = session->submit(request(3, 100)), waiting = session->submit(request(4, 100));
    Generation third = session->submit(request(5, 100)),
               cancelled = session->submit(request(6, 100));
    REQUIRE(begun.next());
    const std::size_t read = begun.tokens().size();
    core->step();  // tokens that nobody has read yet
    cancelled.cancel();
    session.reset();
    CHECK(begun.next());
    CHECK(begun.tokens().size() > read);
    for (Generation* generation : {&begun, &waiting, &third}) {
        CHECK_THROWS_WITH(generation->run(),
                          Catch::Contains("the session was destroyed before this generation"));
        CHECK(generation->finish_reason() == FinishReason::error);
        generation->cancel();
        CHECK_FALSE(generation->next());
    }
    CHECK_FALSE(cancelled.next());
    CHECK(cancelled.finish_reason() == FinishReason::cancelled);
}

TEST_CASE("a failing pass ends its sequences, and later ones are decoded", "[core]") {
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

class LimitedAllocator : public Allocator {
   public:
    void* allocate(std::size_t size) noexcept override {
        return refuse ? nullptr : std::malloc(size);
    }
    void free(void* block) noexcept override { std::free(block); }
    bool refuse = false;
};

}  // namespace

TEST_CASE("without memory the longest sequence ends, and the others go on", "[core]") {
    const auto heap = std::make_shared<LimitedAllocator>();
    const auto core = reciting_core(2, nullptr, heap);
    const auto longer = core->submit(request(40, 100, "ar"), nullptr);
    const auto shorter = core->submit(request(4, 20, "ar"), nullptr);
    for (int step = 0; step < 8; ++step) core->step();  // both prompts are prefilled
    heap->refuse = true;
    CHECK_THROWS_WITH(read_all(*core, *longer), Catch::Contains("there is no memory"));
    CHECK(read_all(*core, *shorter) == expected(4, 20));
}

namespace {

using std::chrono::milliseconds;

class SlowReader : public TextReader {
   public:
    std::string read(std::int64_t, std::optional<std::string>&) override {
        std::this_thread::sleep_for(milliseconds(1));
        return "";
    }
    std::string flush() override { return ""; }
};

}  // namespace

TEST_CASE("engine_seconds include the prompts of others, and host_seconds the reader", "[core]") {
    RecitingBackend* backend = nullptr;
    const auto core = reciting_core(2, &backend);
    backend->before_pass = [] { std::this_thread::sleep_for(milliseconds(2)); };
    backend->before_chunk = [] { std::this_thread::sleep_for(milliseconds(10)); };
    const auto first = core->submit(request(1, 20, "ar"), std::make_unique<SlowReader>());
    core->step();
    const auto second = core->submit(request(129, 20, "ar"), std::make_unique<SlowReader>());
    read_all(*core, *first);
    read_all(*core, *second);
    CHECK(first->stats.passes == 20);
    // The second prompt has 128 tokens before its root, in two chunks of 64.
    CHECK(first->stats.engine_seconds >= 20 * 0.002 + 2 * 0.010);
    CHECK(first->stats.host_seconds() >= 20 * 0.001);
    CHECK(second->stats.engine_seconds >= 20 * 0.002);
    CHECK(second->stats.host_seconds() >= 20 * 0.001);
}

namespace {

class FailingReader : public TextReader {
   public:
    std::string read(std::int64_t, std::optional<std::string>&) override { return ""; }
    std::string flush() override { throw std::bad_alloc(); }
};

}  // namespace

TEST_CASE("a sequence ends even if the rest of its text cannot be published", "[core]") {
    const auto core = reciting_core(2);
    const auto first = core->submit(request(3, 5), std::make_unique<FailingReader>());
    const auto beside = core->submit(request(4, 30), nullptr);
    const auto cancelled = core->submit(request(5, 100), std::make_unique<FailingReader>());
    const auto closed = core->submit(request(6, 100), std::make_unique<FailingReader>());
    const auto waiting = core->submit(request(7, 100), std::make_unique<FailingReader>());
    const auto error_of = [](const SequenceState& sequence) -> std::string {
        if (!sequence.output.end) return "it has not ended";
        try {
            std::rethrow_exception(sequence.output.end->error);
        } catch (const Error& error) {
            return error.what();
        }
    };
    for (int step = 0; step < 10; ++step) core->step();
    CHECK_THAT(error_of(*first), Catch::Contains("there is no memory"));
    cancelled->cancelled = true;
    core->step();
    CHECK_THAT(error_of(*cancelled), Catch::Contains("there is no memory"));
    CHECK(read_all(*core, *beside) == expected(4, 30));
    core->close();
    CHECK_THAT(error_of(*closed), Catch::Contains("there is no memory"));
    CHECK_THAT(error_of(*waiting), Catch::Contains("there is no memory"));
}

TEST_CASE("a failed capture leaves the KV capacity as it was", "[core]") {
    const Manifest manifest = reciting_manifest();
    RecitingBackend backend(manifest, 1);
    Engine engine(backend, true);
    engine.slots().resize(64);
    const std::vector<std::function<void()>> failures{
        [] { throw Error("the pass failed"); },
        [] { throw std::bad_alloc(); },
        [] { throw std::logic_error("a bug"); },
    };
    for (const auto& fail : failures) {
        backend.before_pass = fail;
        CHECK_NOTHROW(engine.capture_graphs(128, 1, {Sampler::greedy}));
        CHECK(backend.capacity() == 64);
    }
}

TEST_CASE("many threads submit, read and cancel at once", "[core]") {
    const auto core = reciting_core(3);
    std::vector<std::thread> threads;
    std::atomic<int> wrong = 0;
    for (int number = 0; number < 4; ++number) {
        threads.emplace_back([&, number] {
            for (int i = 0; i < 25; ++i) {
                const bool is_cancelled = i % 5 == 4;
                const std::size_t prompt_length =
                    static_cast<std::size_t>(1 + (number * 7 + i) % 30);
                const auto sequence = core->submit(
                    request(prompt_length, 20 + i, i % 2 == 0 ? "fused" : "two-pass"), nullptr);
                if (is_cancelled) sequence->cancelled = true;
                const auto tokens = read_all(*core, *sequence);
                const auto all_tokens = expected(prompt_length, 20 + i);
                const bool is_prefix = tokens.size() <= all_tokens.size() &&
                                       std::equal(tokens.begin(), tokens.end(), all_tokens.begin());
                if (!is_prefix || (!is_cancelled && tokens.size() != all_tokens.size())) ++wrong;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK_FALSE(core->step());
}
