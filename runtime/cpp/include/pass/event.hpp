// What the reader of a generation gets.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "pass/export.h"

namespace pass {

// Where a token came from: the model's own choice, or a draft that was one.
enum class Source { model, lookahead, ngram };

// Of one token, by the model before temperature and truncation: its own, and those of the most likely ones.
struct TokenLogprobs {
    float logprob = 0.0F;
    std::vector<std::pair<std::int64_t, float>> top;
};

// One written token. text: what became final with it ("" where nobody asked for text).
struct Token {
    std::int64_t id = 0;
    Source source = Source::model;
    std::optional<TokenLogprobs> logprobs;
    std::string text;
};

// The tokens of one pass, and the text that is final with them.
struct Event {
    std::vector<Token> tokens;
    std::string text;
};

enum class FinishReason { stop, length, cancelled, error };

PASS_API const char* name_of(FinishReason reason);
PASS_API const char* name_of(Source source);

// What ended a text: nothing to name, a token, or a string.
using StopReason = std::variant<std::monostate, std::int64_t, std::string>;

}  // namespace pass
