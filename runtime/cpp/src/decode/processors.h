// The logits processors of one sequence: which tokens its next ones may be, and whose logits change.
//
// What a row of a window may draw depends on the tokens before it: the text, and the drafts of the rows before. These
// are known when a pass is laid out, so every row gets what plain decoding would give it there, and the text is the
// same with any plan. pass_runtime/decode/processors.py explains it.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "backends/backend.h"
#include "pass/options.hpp"

namespace pass {

// What a request does to logits. end_tokens: not drawn before `min_tokens` tokens.
struct Processing {
    std::int64_t vocab_size = 0;
    SamplingParams sampling;
    std::int64_t min_tokens = 0;
    std::set<std::int64_t> end_tokens;
    std::vector<std::vector<std::int64_t>> bad_words;
    std::vector<std::int64_t> allowed_token_ids;
    AllowedTokens allowed_tokens;

    bool does_something() const;
};

// The processors of one sequence. Only the thread that decodes calls them.
class Processors {
   public:
    Processors(Processing processing, const std::vector<std::int64_t>& prompt);

    // The length of the lists of `rows` for a window with so many drafts after `tokens`, which are prompt and text.
    std::size_t size(const std::vector<std::int64_t>& tokens, int drafts);
    // What a window does whose rows follow `tokens` and 0, 1, ... of `drafts` (V: none). size: as `size` says. Throws
    // what the request's own function throws.
    ProcessedRows rows(const std::vector<std::int64_t>& tokens, std::span<const std::int64_t> drafts, std::size_t size);

   private:
    using Bits = std::vector<std::uint32_t>;  // of all tokens, one each

    void read(const std::vector<std::int64_t>& tokens);
    // Whether logits depend on the tokens before.
    bool counts() const;
    void add_biased(std::int64_t token);
    // The tokens that may follow `text`. A rule that would leave none is not applied.
    Bits allowed(std::span<const std::int64_t> text) const;
    // Fill bias, factor and penalty of `rows`, for `count` rows whose lists have `size` tokens.
    void change(ProcessedRows& rows, std::span<const std::int64_t> drafts, std::size_t count, std::size_t size) const;

    Processing processing_;
    std::size_t prompt_, read_;
    std::map<std::int64_t, std::int64_t> written_;  // how often the text has a token
    std::set<std::int64_t> seen_;                   // tokens of prompt and text, if repetition counts
    std::vector<std::int64_t> biased_ids_;          // tokens whose logits may change, each once
    std::set<std::int64_t> known_;                  // the same
};

// Changes nothing: for the slots without processors of a pass that has some.
ProcessedRows no_processing(std::int64_t vocab_size, int rows, std::size_t size);

}  // namespace pass
