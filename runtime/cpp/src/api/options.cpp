#include "pass/options.hpp"

#include <algorithm>
#include <charconv>
#include <limits>
#include <random>
#include <thread>

#include "bundle/window.h"
#include "errors.h"

namespace pass {

namespace {

constexpr double min_top_p = std::numeric_limits<float>::min();  // lower ones mean argmax, as 0

// The number as Python writes it: with a decimal point, and with no more digits than it needs.
std::string text_of(double number) {
    char text[32];
    const auto end = std::to_chars(text, text + sizeof text, number).ptr;
    std::string result(text, end);
    if (result.find_first_not_of("-0123456789") == std::string::npos) result += ".0";
    return result;
}

std::string text_of(std::int64_t number) { return std::to_string(number); }

void require(bool holds, const std::string& rule, const std::string& value) {
    if (!holds) throw Error(rule + ", not " + value);
}

// flag: with its dashes. of: what the number belongs to.
template <class Number>
void check_range(Number number, Number min, Number max, const char* flag, const char* allowed,
                 const std::string& of = "") {
    require(number >= min && number <= max, std::string(flag + 2) + " must be " + allowed,
            text_of(number) + of);
}

}  // namespace

void SamplingParams::check() const {
#define CHECK(type, name, value, min, max, flag, allowed, help) \
    check_range<type>(name, min, max, flag, allowed);
    PASS_SAMPLING_FIELDS(CHECK)
#undef CHECK
    require(logit_bias.size() <= PASS_MAX_BIASES, "logit-bias may have at most 1024 tokens",
            std::to_string(logit_bias.size()));
    for (const auto& [token, bias] : logit_bias) {
        const std::string of_token = " for token " + std::to_string(token);
#define CHECK(type, name, value, min, max, flag, allowed, help) \
    check_range<type>(bias, min, max, flag, allowed, of_token);
        PASS_LOGIT_BIAS_FIELD(CHECK)
#undef CHECK
    }
}

bool SamplingParams::changes_logits() const {
    bool changed = !logit_bias.empty();
#define COMPARE(type, name, value, ...) changed = changed || name != value;
    PASS_PENALTY_FIELDS(COMPARE)
#undef COMPARE
    return changed;
}

SamplingParams SamplingParams::resolved() const {
    SamplingParams result = *this;
    if (!result.seed) result.seed = sampler() == Sampler::greedy ? 0 : std::random_device{}();
    result.top_k = std::max<std::int64_t>(top_k, 0);
    if (top_p < min_top_p) {
        result.temperature = 0;
        result.top_p = 1;
    }
    return result;
}

Sampler SamplingParams::sampler() const {
    if (temperature == 0 || top_p < min_top_p) return Sampler::greedy;
    SamplingParams result = *this;
    result.top_k = std::max<std::int64_t>(top_k, 0);
    bool truncates = false;
#define COMPARE(type, name, value, ...) truncates = truncates || result.name != value;
    PASS_TRUNCATION_FIELDS(COMPARE)
#undef COMPARE
    return truncates ? Sampler::truncated : Sampler::sample;
}

void GenerateOptions::check() const {
    sampling.check();
    require(max_new_tokens >= 1, "max-new-tokens must be at least 1",
            std::to_string(max_new_tokens));
    if (plan != "auto") make_plan(plan, max_lookahead);
    if (draft && *draft != "lookahead" && *draft != "ngram" && *draft != "both")
        throw Error("draft must be one of lookahead, ngram, both, not '" + *draft + "'");
    require(min_tokens >= 0 && min_tokens <= max_new_tokens,
            "min-tokens must be 0 to max-new-tokens", std::to_string(min_tokens));
    std::size_t stop_bytes = 0;
    for (const std::string& text : stop) stop_bytes += text.size();
    if (stop.size() > PASS_MAX_STOPS || stop_bytes > PASS_MAX_STOP_BYTES) {
        throw Error("stop must be at most " + std::to_string(PASS_MAX_STOPS) + " strings, of " +
                    std::to_string(PASS_MAX_STOP_BYTES) + " bytes together");
    }
    require(bad_words.size() <= PASS_MAX_BAD_WORDS, "bad-words may be at most 1024",
            std::to_string(bad_words.size()));
    for (const std::vector<std::int64_t>& word : bad_words)
        require(!word.empty(), "bad words need a token", "none");
    if (logprobs) {
        require(*logprobs >= 0 && *logprobs <= PASS_MAX_LOGPROBS, "logprobs must be 0 to 20",
                std::to_string(*logprobs));
    }
}

void LoadOptions::check() const {
    // ONNX Runtime hangs with too many threads.
    const int max_threads =
        std::max(64, 4 * static_cast<int>(std::max(1U, std::thread::hardware_concurrency())));
    require(threads >= 0 && threads <= max_threads,
            "threads must be 0 (ONNX Runtime's choice) to " + std::to_string(max_threads),
            std::to_string(threads));
    require(max_batch_size >= 1 && max_batch_size <= 1024, "max-batch-size must be 1 to 1024",
            std::to_string(max_batch_size));
    require(max_queue >= 1, "max-queue must be at least 1", std::to_string(max_queue));
    if (speculative_max_concurrency) {
        require(*speculative_max_concurrency >= 0, "speculative-max-concurrency must be at least 0",
                std::to_string(*speculative_max_concurrency));
    }
    if (capacity) {
        require(*capacity >= 4 && *capacity % 4 == 0,
                "capacity must be a multiple of 4 and at least 4", std::to_string(*capacity));
    }
}

}  // namespace pass
