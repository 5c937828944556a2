// The events of a generation, and its metrics as vLLM and AIPerf define them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "pass/export.h"

namespace pass {

// Where a token comes from: the model itself, or an accepted draft of look-ahead rows or n-grams.
enum class TokenSource { model, lookahead, ngram };

// A token's natural log-probability under the model, before biases, penalties, constraints,
// temperature and truncation. top: those of the most likely tokens, by falling probability.
struct TokenLogprobs {
    float logprob = 0.0F;
    std::vector<std::pair<std::int64_t, float>> top;
};

// One written token. text: the part of the text that became final with it, "" without a tokenizer.
// Text is held back while later tokens may complete a character or a stop string.
struct Token {
    std::int64_t id = 0;
    TokenSource source = TokenSource::model;
    std::optional<TokenLogprobs> logprobs;
    std::string text;
};

// The tokens that one pass wrote, and the text that became final with them. The last event of a
// generation may have text that was held back, and no tokens.
struct Event {
    std::vector<Token> tokens;
    std::string text;
};

// length: max_new_tokens are written, or the KV cache is full.
enum class FinishReason { stop, length, cancelled, error };

// The enumerator's name.
PASS_API const char* name_of(FinishReason reason);
PASS_API const char* name_of(TokenSource source);

// The token or the stop string that ended a text; monostate if it ended otherwise.
using StopReason = std::variant<std::monostate, std::int64_t, std::string>;

// Counts of one generation. A step is a pass whose window holds drafts.
struct PASS_API Stats {
    std::string plan = "ar";
    int lookahead = 0;  // L, the most drafts that a step verifies
    std::int64_t prompt_tokens = 0;
    std::int64_t cached_tokens = 0;  // prompt tokens whose K/V were reused
    std::int64_t generated_tokens = 0;
    std::int64_t passes = 0;
    std::int64_t emitted = 0;  // tokens of all passes, also those after the end of the text
    std::int64_t steps = 0;
    std::int64_t drafted = 0;
    std::int64_t accepted = 0;
    std::vector<std::int64_t> histogram;  // [L+1]: steps that accepted exactly 0..L drafts
    double queue_seconds = 0.0;
    double prefill_seconds = 0.0;
    double decode_seconds = 0.0;
    double engine_seconds = 0.0;  // of decode_seconds; the engine may have run for others

    // Count one pass with `drafts` drafts that emitted `count` tokens.
    void record(int drafts, int count);
    // Add the counts of another generation of the same plan, without its prompt tokens and times.
    void add(const Stats& other);

    // Tokens emitted per pass, also over passes without drafts; 0 without passes.
    double tau() const;
    // Tokens emitted per step, the bonus token included: 1 + accepted / steps (vLLM's definition).
    double mean_acceptance_length() const;
    // Accepted drafts / drafted tokens; 0 without drafts.
    double draft_acceptance_rate() const;
    // [L]: the fraction of steps in which draft i was accepted, for i = 1..L; empty without steps.
    std::vector<double> acceptance_per_position() const;
    // [L+1]: `histogram`; empty without steps.
    std::vector<std::int64_t> acceptance_histogram() const;
    // The part of decode_seconds in which the engine did not run.
    double host_seconds() const { return decode_seconds - engine_seconds; }
    // Generated tokens / decode_seconds (from the start of the first pass to the last token).
    double decode_tokens_per_second() const;
};

}  // namespace pass
