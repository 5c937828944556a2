// Events: what `Generation::next` returns.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "pass/export.h"

namespace pass {

// Where a token came from: the model itself, or an accepted draft of look-ahead rows or of prompt lookup (n-grams).
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

// The token or the stop string that ended a text; monostate where it ended otherwise.
using StopReason = std::variant<std::monostate, std::int64_t, std::string>;

}  // namespace pass
