// What a generation returns: its tokens in events, why it ended, and metrics as vLLM defines them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "pass/export.h"

namespace pass {

// Where a token comes from: the model wrote it, or accepted a draft of look-ahead rows or n-grams.
enum class TokenSource { model, lookahead, ngram };

// A token's natural log-probability under the model, before biases, penalties, constraints,
// temperature and truncation. top: ids and log-probabilities of the likeliest tokens, falling.
struct TokenLogprobs {
    float logprob = 0.0F;
    std::vector<std::pair<std::int64_t, float>> top;
};

// One written token. text: the text that became final with this token; "" without a tokenizer. Text
// is held back while the next tokens may complete a character or a stop string.
struct Token {
    std::int64_t id = 0;
    TokenSource source = TokenSource::model;
    std::optional<TokenLogprobs> logprobs;
    std::string text;
};

// The tokens that one pass wrote, and the text that became final with them. The last event of a
// generation may have no tokens, only text that was held back.
struct Event {
    std::vector<Token> tokens;
    std::string text;
};

// stop: a `StopReason` ended the text. length: max_new_tokens are written, or the KV cache is full.
enum class FinishReason { stop, length, cancelled, error };

// The name of the enumerator, such as "length".
PASS_API const char* name_of(FinishReason reason);
PASS_API const char* name_of(TokenSource source);

// The token id or the stop string that ended a text; monostate if neither did.
using StopReason = std::variant<std::monostate, std::int64_t, std::string>;

// Counts of one generation. A step is a pass that verifies drafts.
struct PASS_API Stats {
    std::string plan = "ar";  // the mode, such as "fused" or "auto"
    int lookahead = 0;        // L, the most drafts that a step can accept
    std::int64_t prompt_tokens = 0;
    std::int64_t cached_tokens = 0;  // prompt tokens whose K/V were reused
    std::int64_t generated_tokens = 0;
    std::int64_t passes = 0;
    std::int64_t emitted = 0;  // tokens that passes wrote, also after the end of the text
    std::int64_t steps = 0;
    std::int64_t drafted = 0;             // drafts that steps verified; a tree counts as its depth
    std::int64_t accepted = 0;            // of these, those that were accepted
    std::vector<std::int64_t> histogram;  // [L+1] for i = 0..L, the steps that accepted i drafts
    double queue_seconds = 0.0;           // until the request got a slot
    double prefill_seconds = 0.0;
    double decode_seconds = 0.0;
    double engine_seconds = 0.0;  // the part of decode_seconds in which the engine ran

    // Count one pass that verified `drafts` drafts and emitted `count` tokens.
    void record(int drafts, int count);
    // Add the counts, but no prompt tokens and times, of another generation with the same plan.
    void add(const Stats& other);

    // Tokens emitted per pass, also over passes without drafts; 0 without passes.
    double tau() const;
    // Tokens emitted per step, the bonus token included: 1 + accepted / steps (vLLM's definition).
    double mean_acceptance_length() const;
    // accepted / drafted; 0 without drafts.
    double draft_acceptance_rate() const;
    // [L] for i = 1..L, the fraction of steps that accepted draft i; empty without steps.
    std::vector<double> acceptance_per_position() const;
    // [L+1] a copy of `histogram`, but empty without steps.
    std::vector<std::int64_t> acceptance_histogram() const;
    // The rest of decode_seconds, in which the engine did not run.
    double host_seconds() const { return decode_seconds - engine_seconds; }
    // Generated tokens / decode_seconds (from the start of the first pass to the last token).
    double decode_tokens_per_second() const;
};

}  // namespace pass
