#include "pass/options.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <random>
#include <thread>

#include "backends/capabilities.h"
#include "bundle/plan.h"
#include "errors.h"

namespace pass {

namespace {

constexpr std::int64_t max_top_k = 1024;
constexpr double min_top_p = std::numeric_limits<float>::min();  // lower ones mean argmax, as 0
constexpr std::size_t max_stops = 64, max_stop_bytes = 4096;
constexpr std::size_t max_biases = 1024, max_bad_words = 1024;

// The number as Python writes it: with a decimal point, and with no more digits than it needs.
std::string text_of(double number) {
    char text[32];
    const auto end = std::to_chars(text, text + sizeof text, number).ptr;
    std::string result(text, end);
    if (result.find_first_not_of("-0123456789") == std::string::npos) result += ".0";
    return result;
}

void require(bool holds, const std::string& rule, const std::string& value) {
    if (!holds) throw Error(rule + ", not " + value);
}

}  // namespace

void SamplingParams::check() const {
    require(temperature >= 0 && std::isfinite(temperature),
            "temperature must be a number of at least 0", text_of(temperature));
    require(top_k >= -1 && top_k <= max_top_k, "top-k must be 0 or -1 (off) to 1024",
            std::to_string(top_k));
    require(top_p >= 0 && top_p <= 1, "top-p must be 0 to 1 (off)", text_of(top_p));
    require(min_p >= 0 && min_p <= 1, "min-p must be 0 (off) to 1", text_of(min_p));
    for (const auto& [name, value] : {std::pair{"presence-penalty", presence_penalty},
                                      std::pair{"frequency-penalty", frequency_penalty}}) {
        require(value >= -2 && value <= 2, std::string(name) + " must be -2 to 2 (0 is off)",
                text_of(value));
    }
    require(repetition_penalty >= 0.01 && repetition_penalty <= 100,
            "repetition-penalty must be 0.01 to 100 (1 is off)", text_of(repetition_penalty));
    require(logit_bias.size() <= max_biases, "logit-bias may have at most 1024 tokens",
            std::to_string(logit_bias.size()));
    for (const auto& [token, bias] : logit_bias) {
        require(bias >= -100 && bias <= 100, "logit-bias must be -100 to 100",
                text_of(bias) + " for token " + std::to_string(token));
    }
}

bool SamplingParams::changes_logits() const {
    return !logit_bias.empty() || presence_penalty != 0 || frequency_penalty != 0 ||
           repetition_penalty != 1;
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
    return top_k > 0 || top_p < 1 || min_p != 0 ? Sampler::truncated : Sampler::sample;
}

void GenerateOptions::check() const {
    sampling.check();
    require(max_new_tokens >= 1, "max-new-tokens must be at least 1",
            std::to_string(max_new_tokens));
    // Throws Error for an unknown plan. Trees depend on the bundle: `Core::choose` checks them.
    if (plan != "auto" && !plan.starts_with("tree")) make_cycle(plan, max_lookahead);
    if (draft && *draft != "lookahead" && *draft != "ngram" && *draft != "both")
        throw Error("draft must be one of lookahead, ngram, both, not '" + *draft + "'");
    require(min_tokens >= 0 && min_tokens <= max_new_tokens,
            "min-tokens must be 0 to max-new-tokens", std::to_string(min_tokens));
    std::size_t stop_bytes = 0;
    for (const std::string& text : stop) stop_bytes += text.size();
    if (stop.size() > max_stops || stop_bytes > max_stop_bytes) {
        throw Error("stop must be at most " + std::to_string(max_stops) + " strings, of " +
                    std::to_string(max_stop_bytes) + " bytes together");
    }
    require(bad_words.size() <= max_bad_words, "bad-words may be at most 1024",
            std::to_string(bad_words.size()));
    for (const std::vector<std::int64_t>& word : bad_words)
        require(!word.empty(), "bad words need a token", "none");
    if (logprobs) {
        require(*logprobs >= 0 && *logprobs <= max_logprobs, "logprobs must be 0 to 20",
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
