// What a generation returns: events, and its metrics as vLLM and AIPerf define them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "pass/export.h"

namespace pass {

// If a token came from: the model itself, or an accepted draft of look-ahead rows or of prompt lookup (n-grams).
enum class TokenSource { model, lookahead, ngram };

// Log-probabilities under the model, before temperature and truncation: that of the token, and those of the `top` most
// likely tokens with their ids.
struct TokenLogprobs {
    float logprob = 0.0F;
    std::vector<std::pair<std::int64_t, float>> top;
};

// One written token. text: the part of the text that became final with it, "" without a tokenizer.
struct Token {
    std::int64_t id = 0;
    TokenSource source = TokenSource::model;
    std::optional<TokenLogprobs> logprobs;
    std::string text;
};

// The tokens that one pass wrote, and the text that became final with them.
struct Event {
    std::vector<Token> tokens;
    std::string text;
};

enum class FinishReason { stop, length, cancelled, error };

PASS_API const char* name_of(FinishReason reason);
PASS_API const char* name_of(TokenSource source);

// The token or the stop string that ended a text; monostate if it ended otherwise.
using StopReason = std::variant<std::monostate, std::int64_t, std::string>;

// Counts of one generation. A step is a draft/accept decision: a pass whose window holds drafts.
struct PASS_API Stats {
    std::string plan = "ar";
    int lookahead = 0;
    std::int64_t prompt_tokens = 0;
    std::int64_t cached_tokens = 0;
    std::int64_t generated_tokens = 0;
    std::int64_t passes = 0;
    std::int64_t emitted = 0;
    std::int64_t steps = 0;
    std::int64_t drafted = 0;
    std::int64_t accepted = 0;
    std::vector<std::int64_t> histogram;  // [L+1]: steps that accepted exactly 0..L drafts
    double queue_seconds = 0.0;
    double prefill_seconds = 0.0;
    double decode_seconds = 0.0;
    double engine_seconds = 0.0;  // of decode_seconds: in which the engine ran a pass of any sequence

    // Count one trunk pass with `drafts` drafts that emitted `count` tokens, before any were cut at a stop or the
    // limit.
    void record(int drafts, int count);
    // Add the counts of another generation of the same plan.
    void add(const Stats& other);

    // Tokens emitted per trunk pass, bonus tokens included, draft passes counted.
    double tau() const;
    // Tokens emitted per step, the bonus token included: 1 + accepted / steps (vLLM's definition).
    double mean_acceptance_length() const;
    // Accepted drafts / drafted tokens.
    double draft_acceptance_rate() const;
    // [L]: the fraction of steps in which draft i was accepted, for i = 1..L; empty without steps.
    std::vector<double> acceptance_per_position() const;
    // [L+1]: `histogram`; empty without steps.
    std::vector<std::int64_t> acceptance_histogram() const;
    // The part of decode_seconds that lies between passes: the time of the host.
    double host_seconds() const { return decode_seconds - engine_seconds; }
    // Generated tokens / seconds from the end of prefill to the last token.
    double decode_tokens_per_second() const;
};

}  // namespace pass
