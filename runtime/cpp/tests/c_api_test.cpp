#include "api/c_api.h"

#include <atomic>
#include <thread>

#include "catch.hpp"
#include "log.h"
#include "reciting.h"

using namespace pass::test;

namespace {

// `of` returns the text of the error if a call failed.
struct Failure {
    char text[200] = "";
    std::string of(const void* handle) { return handle == nullptr ? text : "no failure"; }
    std::string of(int code) { return code < 0 ? text : "no failure"; }
};

}  // namespace

TEST_CASE("the C API refuses null arguments", "[c_api]") {
    Failure failure;
    const auto size = sizeof failure.text;
    std::int64_t token = 0;
    pass_session session{pass::Session(reciting_core(1)), {}};
    CHECK(failure.of(pass_open(nullptr, nullptr, failure.text, size)) ==
          "the bundle's path is null");
    CHECK(failure.of(pass_submit(nullptr, &token, 1, nullptr, failure.text, size)) ==
          "the session is null");
    CHECK(failure.of(pass_submit(&session, nullptr, 1, nullptr, failure.text, size)) ==
          "prompt_ids is null");
    CHECK(failure.of(pass_step(nullptr, failure.text, size)) == "the session is null");
    CHECK(failure.of(pass_next(nullptr, &token, 1, failure.text, size)) ==
          "the generation is null");
    CHECK(failure.of(pass_poll(nullptr, &token, 1, failure.text, size)) ==
          "the generation is null");
    CHECK(pass_encode(&session, "text", &token, 1, failure.text, size) == -1);
    CHECK(std::string(failure.text) ==
          "the session has no tokenizer: open it with the option text");
    CHECK(pass_next(nullptr, nullptr, 0, nullptr, 0) == -1);
    CHECK(pass_finish_reason(nullptr) == nullptr);
    CHECK(std::string(pass_text(nullptr, nullptr)).empty());
    CHECK(pass_token_logprobs(nullptr, 0, nullptr, nullptr, nullptr, 0) == -1);
    CHECK(pass_get_stats(nullptr).passes == 0);
    pass_cancel(nullptr);
    pass_free(nullptr);
    pass_close(nullptr);

    pass_generate_options options = pass_default_generate_options();
    options.stop_token_count = 1;
    CHECK(failure.of(pass_submit(&session, &token, 1, &options, failure.text, size)) ==
          "stop_token_ids is null");
    options = pass_default_generate_options();
    options.stop_count = 1;
    CHECK(failure.of(pass_submit(&session, &token, 1, &options, failure.text, size)) ==
          "stop is null");
    const char* const stop[] = {"x"};
    options.stop = stop;
    CHECK_THAT(failure.of(pass_submit(&session, &token, 1, &options, failure.text, size)),
               Catch::Matchers::StartsWith("stop strings need text"));
}

TEST_CASE("the C API takes options and statistics of other sizes", "[c_api]") {
    Failure failure;
    std::int64_t token = 1;
    pass_session session{pass::Session(reciting_core(1)), {}};
    pass_generate_options options = pass_default_generate_options();
    CHECK(options.size == sizeof options);
    options.size = 0;
    CHECK_THAT(
        failure.of(pass_submit(&session, &token, 1, &options, failure.text, sizeof failure.text)),
        Catch::Matchers::StartsWith("the options have no size"));
    // The struct of a newer header is longer. Fields that the library does not know are ignored.
    struct Newer {
        pass_generate_options options;
        char unknown_fields[64];
    } newer{pass_default_generate_options(), {}};
    newer.options.size = sizeof newer;
    pass_generation* generation =
        pass_submit(&session, &token, 1, &newer.options, failure.text, sizeof failure.text);
    REQUIRE(generation != nullptr);
    pass_free(generation);
    // A caller with a shorter struct gets only as many bytes as the struct has.
    struct Shorter {
        std::int64_t prompt_tokens, guard;
    } shorter{7, 7};
    pass_read_stats(nullptr, reinterpret_cast<pass_stats*>(&shorter), sizeof shorter.prompt_tokens);
    CHECK(shorter.prompt_tokens == 0);
    CHECK(shorter.guard == 7);
}

TEST_CASE("the C API reads tokens and their log-probabilities", "[c_api]") {
    char error[200] = "";
    pass_session session{pass::Session(reciting_core(1)), {}};
    pass_generate_options options = pass_default_generate_options();
    options.max_new_tokens = 9;
    options.plan = "fused";
    options.logprobs = 2;
    const pass::Request prompt = request(5, 9);
    pass_generation* generation =
        pass_submit(&session, prompt.prompt_ids.data(), prompt.prompt_ids.size(), &options, error,
                    sizeof error);
    REQUIRE(generation != nullptr);
    std::vector<std::int64_t> written;
    std::int64_t tokens[2], top[3];
    float logprob = 1, tops[3];
    CHECK(pass_next(generation, tokens, 0, error, sizeof error) == -1);
    CHECK(pass_finish_reason(generation) == nullptr);
    while (const int count = pass_next(generation, tokens, 2, error, sizeof error)) {
        REQUIRE(count > 0);
        written.insert(written.end(), tokens, tokens + count);
        CHECK(pass_token_logprobs(generation, 0, &logprob, top, tops, 3) == 2);
        CHECK(pass_token_logprobs(generation, static_cast<std::size_t>(count), &logprob, top, tops,
                                  3) == -1);
    }
    CHECK(written == expected(5, 9));
    CHECK(std::string(pass_finish_reason(generation)) == "length");
    CHECK(pass_get_stats(generation).generated_tokens == 9);
    CHECK(std::string(pass_version()).starts_with("0."));
    pass_free(generation);
}

TEST_CASE("a request with reuse_prefix reuses K/V that other requests do not", "[c_api]") {
    char error[200] = "";
    pass_session session{pass::Session(reciting_core(1)), {}};
    pass_generate_options options = pass_default_generate_options();
    CHECK(options.reuse_prefix == 0);
    options.max_new_tokens = 2;
    const pass::Request prompt = request(40, 2);
    const auto count_reused = [&] {
        pass_generation* generation =
            pass_submit(&session, prompt.prompt_ids.data(), prompt.prompt_ids.size(), &options,
                        error, sizeof error);
        REQUIRE(generation != nullptr);
        std::int64_t token = 0;
        while (pass_next(generation, &token, 1, error, sizeof error) > 0) {
        }
        const std::int64_t result = pass_get_stats(generation).cached_tokens;
        pass_free(generation);
        return result;
    };
    CHECK(count_reused() == 0);
    CHECK(count_reused() == 0);
    options.reuse_prefix = 1;
    CHECK(count_reused() == 32);  // of 39 tokens, in blocks of 16
}

TEST_CASE("a poll neither waits nor decodes", "[c_api]") {
    char error[200] = "";
    pass_session session{pass::Session(reciting_core(1)), {}};
    pass_generate_options options = pass_default_generate_options();
    options.max_new_tokens = 20;
    options.plan = "fused";
    const pass::Request prompt = request(5, 20);
    const auto submit = [&] {
        return pass_submit(&session, prompt.prompt_ids.data(), prompt.prompt_ids.size(), &options,
                           error, sizeof error);
    };
    pass_generation* generation = submit();
    std::vector<std::int64_t> written;
    std::int64_t tokens[3];
    CHECK(pass_poll(generation, tokens, 3, error, sizeof error) == 0);
    CHECK(pass_get_stats(generation).passes == 0);
    CHECK(pass_finish_reason(generation) == nullptr);
    while (pass_finish_reason(generation) == nullptr) {
        CHECK(pass_step(&session, error, sizeof error) >= 0);
        while (const int count = pass_poll(generation, tokens, 3, error, sizeof error)) {
            REQUIRE(count > 0);
            written.insert(written.end(), tokens, tokens + count);
        }
    }
    CHECK(written == expected(5, 20));
    CHECK(pass_poll(generation, tokens, 3, error, sizeof error) == 0);
    pass_free(generation);

    generation = submit();  // while another thread steps
    std::atomic<bool> done = false;
    std::thread steps([&] {
        while (!done) pass_step(&session, nullptr, 0);
    });
    written.clear();
    while (pass_finish_reason(generation) == nullptr) {
        const int count = pass_poll(generation, tokens, 3, error, sizeof error);
        REQUIRE(count >= 0);
        written.insert(written.end(), tokens, tokens + count);
    }
    done = true;
    steps.join();
    CHECK(written == expected(5, 20));
    pass_free(generation);

    generation = submit();
    session.session.close();
    CHECK(pass_poll(generation, tokens, 3, error, sizeof error) == 0);
    CHECK(std::string(pass_finish_reason(generation)) == "cancelled");
    pass_free(generation);
}

TEST_CASE("a program's log gets messages of its level", "[c_api]") {
    std::vector<std::string> messages;
    const auto keep = [](void* user, int level, const char* message) {
        static_cast<std::vector<std::string>*>(user)->push_back(std::to_string(level) + message);
    };
    pass_set_log(keep, &messages, PASS_LOG_WARNING);
    pass::log(pass::LogLevel::info, " quiet");
    pass::log(pass::LogLevel::warning, " loud");
    pass::log(pass::LogLevel::error, " louder");
    pass_set_log(nullptr, nullptr, PASS_LOG_VERBOSE);
    CHECK(pass::log_level() == pass::LogLevel::error);
    CHECK(messages == std::vector<std::string>{"2 loud", "3 louder"});
}

// Fields keep their places: new ones go to the end.
static_assert(offsetof(pass_load_options, prefix_cache) == 64);
static_assert(offsetof(pass_generate_options, repetition_penalty) == 144);
static_assert(offsetof(pass_generate_options, reuse_prefix) == 248);
static_assert(offsetof(pass_stats, decode_seconds) == 64);

TEST_CASE("programs with an older header open a bundle", "[c_api]") {
    Failure failure;
    pass_load_options options = pass_default_load_options();
    CHECK(options.prefix_cache == 1);
    CHECK(options.speculative_max_concurrency == -1);
    options.speculative_max_concurrency = -2;  // such a program's struct ends before this field
    options.size = offsetof(pass_load_options, speculative_max_concurrency);
    CHECK_THAT(failure.of(pass_open("nowhere", &options, failure.text, sizeof failure.text)),
               Catch::Matchers::StartsWith("nowhere is not a bundle"));
}
