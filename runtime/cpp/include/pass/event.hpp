// What a generation returns. Metrics are as vLLM defines them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "pass/export.h"

namespace pass {

// The model wrote it, or accepted a draft of look-ahead rows or n-grams.
enum class TokenSource { model, lookahead, ngram };

// A token's natural log-probability under the model, before biases, penalties, constraints,
// temperature and truncation. top: ids and log-probabilities of the likeliest tokens, falling.
struct TokenLogprobs {
    float logprob = 0.0F;
    std::vector<std::pair<std::int64_t, float>> top;
};

// text: what became final with this token; "" without a tokenizer. Text is held back while the next
// tokens may complete a character or a stop string.
struct Token {
    std::int64_t id = 0;
    TokenSource source = TokenSource::model;
    std::optional<TokenLogprobs> logprobs;
    std::string text;
};

// What one pass wrote. The last event may have no tokens, only text that was held back.
struct Event {
    std::vector<Token> tokens;
    std::string text;
};

// stop: a `StopReason` ended the text. length: max_new_tokens are written, or the KV cache is full.
enum class FinishReason { stop, length, cancelled, error };

PASS_API const char* name_of(FinishReason reason);
PASS_API const char* name_of(TokenSource source);

// The token id or the stop string that ended the text.
using StopReason = std::variant<std::monostate, std::int64_t, std::string>;

// Counts of one generation. A step is a pass that verifies drafts.
struct PASS_API Stats {
    std::string plan = "ar";  // such as "fused+ngram" or "auto"
    int lookahead = 0;        // L, the most drafts that a step can accept
    std::int64_t prompt_tokens = 0;
    std::int64_t cached_tokens = 0;  // prompt tokens whose K/V were reused
    std::int64_t generated_tokens = 0;
    std::int64_t passes = 0;
    std::int64_t emitted = 0;  // tokens that passes wrote, also after the end of the text
    std::int64_t steps = 0;
    std::int64_t drafted = 0;             // drafts that steps verified
    std::int64_t accepted = 0;            // of these, those that were accepted
    std::vector<std::int64_t> histogram;  // [L+1] for i = 0..L, the steps that accepted i drafts
    double queue_seconds = 0.0;           // until the request got a slot
    double prefill_seconds = 0.0;
    double decode_seconds = 0.0;
    double engine_seconds = 0.0;  // the part of decode_seconds in which the engine ran

    // Count one pass.
    void record(int drafts, int count);

    // Tokens emitted per pass; 0 without passes.
    double tau() const;
    // 1 + accepted / steps: the bonus token counts.
    double mean_acceptance_length() const;
    // accepted / drafted; 0 without drafts.
    double draft_acceptance_rate() const;
    // [L] for i = 1..L, the fraction of steps that accepted draft i; empty without steps.
    std::vector<double> acceptance_per_position() const;
    // [L+1] empty without steps.
    std::vector<std::int64_t> acceptance_histogram() const;
    double host_seconds() const { return decode_seconds - engine_seconds; }
    // decode_seconds are from the start of the first pass to the last token.
    double decode_tokens_per_second() const;
};

}  // namespace pass
