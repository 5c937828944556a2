// The logits processors of one sequence, which forbid tokens and change logits, as in
// pass_runtime/decode/processors.py.
//
// What the processors do to a row of a window depends on the tokens before the row: the text, and
// the drafts in earlier rows. These tokens are known before the pass, so every row is processed as
// in plain decoding, and the text is the same with any plan.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "backends/backend.h"
#include "pass/options.hpp"

namespace pass {

// What a request asks of the processors. end_tokens: tokens that are not drawn until `min_tokens`
// tokens are written. The others are as in GenerateOptions.
struct Processing {
    std::int64_t vocab_size = 0;
    SamplingParams sampling;
    std::int64_t min_tokens = 0;
    std::set<std::int64_t> end_tokens;
    std::vector<std::vector<std::int64_t>> bad_words;
    std::vector<std::int64_t> allowed_token_ids;
    AllowedTokens allowed_tokens;

    // Whether any field forbids tokens or changes logits.
    bool changes_logits() const;
};

// The processors of one sequence. Only the thread that decodes calls them.
class Processors {
   public:
    Processors(Processing processing, const std::vector<std::int64_t>& prompt);

    // The length of the token lists (T of `ProcessedRows`) that a window with `drafts` draft rows
    // needs. tokens: prompt and text.
    std::size_t list_size(const std::vector<std::int64_t>& tokens, int drafts);
    // What to do to the rows of a window. Its root follows `tokens`; each later row follows one
    // more of `drafts`, in which the id vocab_size stands for no draft. size: the length of the
    // token lists, at least `list_size`. Throws what the request's `allowed_tokens` throws.
    ProcessedRows rows(const std::vector<std::int64_t>& tokens,
                       std::span<const std::int64_t> drafts, std::size_t size);

   private:
    using Bits = std::vector<std::uint32_t>;  // one bit for each token, 1 if it is allowed

    // Record the tokens that are new since the last call. tokens: prompt and text.
    void read(const std::vector<std::int64_t>& tokens);
    // Whether there are penalties, so that logits depend on the tokens before.
    bool penalizes() const;
    void add_changed(std::int64_t token);
    // The tokens that may follow `text`. A constraint that would leave none is not applied.
    Bits allowed(std::span<const std::int64_t> text) const;
    // Fill all of `result` but `allowed`, for `num_rows` rows and token lists of length `size`.
    void fill_changes(ProcessedRows& result, std::span<const std::int64_t> drafts,
                      std::size_t num_rows, std::size_t size) const;

    Processing processing_;
    std::size_t prompt_length_, num_read_;               // in tokens
    std::map<std::int64_t, std::int64_t> token_counts_;  // of the text, without the prompt
    std::set<std::int64_t> seen_;            // of prompt and text, if there is a repetition penalty
    std::vector<std::int64_t> changed_ids_;  // tokens whose logits may change, each once
    std::set<std::int64_t> changed_;         // the same tokens, for look-ups
};

// Rows that change nothing, for a slot without processors in a pass in which others have some.
ProcessedRows no_processing(std::int64_t vocab_size, int rows, std::size_t size);

}  // namespace pass
