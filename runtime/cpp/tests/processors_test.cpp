#include "catch.hpp"

#include "decode/processors.h"
#include "reciting.h"

using namespace pass;
using namespace pass::test;

namespace {

constexpr std::int64_t vocab_size = 70;  // its bits fill two words of 32, and a part of a third

Processing processing() {
    Processing result;
    result.vocab_size = vocab_size;
    return result;
}

std::set<std::int64_t> allowed(const ProcessedRows& rows, std::size_t row) {
    constexpr std::size_t bytes = (vocab_size + 7) / 8;
    std::set<std::int64_t> result;
    for (std::int64_t token = 0; token < vocab_size; ++token) {
        const std::int32_t byte = rows.allowed[row * bytes + static_cast<std::size_t>(token) / 8];
        if ((byte >> (token % 8) & 1) != 0) result.insert(token);
    }
    return result;
}

std::set<std::int64_t> all_but(const std::set<std::int64_t>& banned) {
    std::set<std::int64_t> result;
    for (std::int64_t token = 0; token < vocab_size; ++token) {
        if (!banned.contains(token)) result.insert(token);
    }
    return result;
}

}  // namespace

TEST_CASE("the last token of a bad word is forbidden, also after drafts", "[processors]") {
    Processing wanted = processing();
    wanted.bad_words = {{5, 6}, {9}, {1, 2, 3}};
    Processors processors(wanted, {5, 1, 2});
    // The prompt is 5, 1, 2; the last draft row has no draft.
    const std::vector<std::int64_t> tokens{5, 1, 2, 7}, drafts{5, 1, 2, vocab_size};
    const ProcessedRows rows = processors.rows(tokens, drafts, processors.list_size(tokens, 4));
    CHECK(allowed(rows, 0) == all_but({9}));  // bad words do not begin in the prompt
    CHECK(allowed(rows, 1) == all_but({6, 9}));
    CHECK(allowed(rows, 2) == all_but({9}));
    CHECK(allowed(rows, 3) == all_but({3, 9}));
    CHECK(allowed(rows, 4) == all_but({}));  // no token is drawn from a row without a draft
}

TEST_CASE("end tokens are forbidden until min_tokens are written", "[processors]") {
    Processing wanted = processing();
    wanted.min_tokens = 3;
    wanted.end_tokens = {0, 4};
    Processors processors(wanted, {8});
    const ProcessedRows rows = processors.rows({8, 7}, std::vector<std::int64_t>{6, 6}, 16);
    CHECK(allowed(rows, 0) == all_but({0, 4}));
    CHECK(allowed(rows, 1) == all_but({0, 4}));
    CHECK(allowed(rows, 2) == all_but({}));
}

TEST_CASE("a constraint that would leave no token is not applied", "[processors]") {
    Processing wanted = processing();
    wanted.allowed_token_ids = {3, 69};
    wanted.bad_words = {{3}, {69}};
    wanted.allowed_tokens = [](std::span<const std::int64_t> text, std::span<std::uint32_t> bits) {
        REQUIRE(bits.size() == 3);
        if (text.size() == 1) bits[0] = bits[1] = bits[2] = 0;
        if (text.size() == 2) bits[0] = bits[1] = 0;
    };
    Processors processors(wanted, {});
    const ProcessedRows rows = processors.rows({1}, std::vector<std::int64_t>{2}, 16);
    CHECK(allowed(rows, 0) == std::set<std::int64_t>{3, 69});
    CHECK(allowed(rows, 1) == std::set<std::int64_t>{69});
}

TEST_CASE("penalties count the text and the drafts before a row", "[processors]") {
    Processing wanted = processing();
    wanted.sampling.presence_penalty = 0.5;
    wanted.sampling.frequency_penalty = 0.25;
    wanted.sampling.repetition_penalty = 2;
    wanted.sampling.logit_bias = {{11, -3.0}};
    Processors processors(wanted, {20});
    const std::vector<std::int64_t> tokens{20, 30, 30}, drafts{40, 30};  // the prompt is 20
    const std::size_t size = processors.list_size(tokens, 2);
    CHECK(size == 16);
    const ProcessedRows rows = processors.rows(tokens, drafts, size);
    // The bias, factor and penalty of a token in a row.
    const auto at = [&](std::int64_t token, std::size_t row) {
        const auto index =
            std::find(rows.touched.begin(), rows.touched.end(), token) - rows.touched.begin();
        const auto i = static_cast<std::size_t>(index);
        return std::vector<float>{rows.bias[i], rows.factor[row * size + i],
                                  rows.penalty[row * size + i]};
    };
    CHECK(at(11, 0) == std::vector<float>{-3, 1, 0});
    CHECK(at(20, 0) == std::vector<float>{0, 2, 0});  // only repetition counts in the prompt
    CHECK(at(30, 0) == std::vector<float>{0, 2, 1.0F});
    CHECK(at(40, 0) == std::vector<float>{0, 1, 0});
    CHECK(at(40, 1) == std::vector<float>{0, 2, 0.75F});
    CHECK(at(30, 2) == std::vector<float>{0, 2, 1.25F});
    const std::set<std::int64_t> listed(rows.touched.begin(), rows.touched.end());
    CHECK(listed == std::set<std::int64_t>{11, 20, 30, 40});
}

TEST_CASE("if a request's allowed_tokens throws, only that request ends", "[processors]") {
    const auto core = reciting_core(2);
    Request sent = request(3, 50);
    sent.options.allowed_tokens = [](std::span<const std::int64_t> text, std::span<std::uint32_t>) {
        if (text.size() > 5) throw Error("no such text");
    };
    const auto first = core->submit(sent, nullptr), second = core->submit(request(4, 50), nullptr);
    CHECK_THROWS_WITH(read_all(*core, *first), "no such text");
    CHECK(read_all(*core, *second) == expected(4, 50));
}

TEST_CASE("wrong options of processors are refused in one line", "[processors]") {
    const auto refused = [](const auto& change) {
        GenerateOptions options;
        change(options);
        try {
            options.check();
        } catch (const Error& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    CHECK(refused([](GenerateOptions& o) { o.sampling.presence_penalty = 3; }) ==
          "presence-penalty must be -2 to 2 (0 is off), not 3.0");
    CHECK(refused([](GenerateOptions& o) { o.sampling.repetition_penalty = 0; }) ==
          "repetition-penalty must be 0.01 to 100 (1 is off), not 0.0");
    CHECK(refused([](GenerateOptions& o) { o.sampling.logit_bias[3] = 101; }) ==
          "logit-bias must be -100 to 100, not 101.0 for token 3");
    CHECK(refused([](GenerateOptions& o) { o.min_tokens = 1000; }) ==
          "min-tokens must be 0 to max-new-tokens, not 1000");
    CHECK(refused([](GenerateOptions& o) { o.bad_words.emplace_back(); }) ==
          "bad words need a token, not none");
    CHECK(refused([](GenerateOptions& o) { o.stop.assign(65, "x"); }) ==
          "stop must be at most 64 strings, of 4096 bytes together");
    CHECK(refused([](GenerateOptions& o) {
              o.stop = {std::string(4096, ' '), "x"};
          }) == "stop must be at most 64 strings, of 4096 bytes together");
    const auto core = reciting_core(1);
    Request sent = request(3, 5);
    sent.options.bad_words = {{vocab}};
    CHECK_THROWS_WITH(core->submit(sent, nullptr), "token id 50 is not in the vocabulary of 50");
}
