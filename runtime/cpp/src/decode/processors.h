// Logits processors, as in pass_runtime/decode/processors.py. The tokens before each row of a
// window are known before the pass, so every row is processed as in plain decoding.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "backends/backend.h"
#include "pass/options.hpp"

namespace pass {

// What a request asks of the processors, as in GenerateOptions. end_tokens: not drawn until
// `min_tokens` tokens are written.
struct Processing {
    std::int64_t vocab_size = 0;
    SamplingParams sampling;
    std::int64_t min_tokens = 0;
    std::set<std::int64_t> end_tokens;
    std::vector<std::vector<std::int64_t>> bad_words;
    std::vector<std::int64_t> allowed_token_ids;
    AllowedTokens allowed_tokens;

    bool changes_logits() const;
};

// Of one sequence. tokens: prompt and text.
class Processors {
   public:
    Processors(Processing processing, const std::vector<std::int64_t>& prompt);

    // T of `ProcessedRows` for a window with `drafts` draft rows.
    std::size_t list_size(const std::vector<std::int64_t>& tokens, int drafts);
    // What to do to a window whose root follows `tokens`. In `drafts`, vocab_size stands for no
    // draft. size: T, at least `list_size`. Throws what the request's `allowed_tokens` throws.
    ProcessedRows rows(const std::vector<std::int64_t>& tokens,
                       std::span<const std::int64_t> drafts, std::size_t size);

   private:
    using Bits = std::vector<std::uint32_t>;  // one bit for each token, 1 if it is allowed

    // Record the tokens that are new since the last call.
    void read(const std::vector<std::int64_t>& tokens);
    bool penalizes() const;
    // What may follow `text`. A constraint that would leave no token is not applied.
    Bits allowed(std::span<const std::int64_t> text) const;
    // Fill all of `result` but `allowed`.
    void fill_changes(ProcessedRows& result, std::span<const std::int64_t> drafts,
                      std::size_t num_rows, std::size_t size) const;

    Processing processing_;
    std::size_t prompt_length_, num_read_;               // in tokens
    std::map<std::int64_t, std::int64_t> token_counts_;  // of the text, without the prompt
    std::set<std::int64_t> seen_;     // of prompt and text, if there is a repetition penalty
    std::set<std::int64_t> changed_;  // tokens whose logits may change
};

// For a slot without processors in a pass in which others have some.
ProcessedRows no_processing(std::int64_t vocab_size, int rows, std::size_t size);

}  // namespace pass
