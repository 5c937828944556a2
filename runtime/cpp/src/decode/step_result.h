// What a pass did for one sequence.
#pragma once

#include <memory>
#include <vector>

#include "backends/backend.h"
#include "decode/sequence.h"

namespace pass {

// Its window held drafts from `source`, `drafted` one after another, and the pass emitted `tokens`.
struct StepResult {
    std::shared_ptr<Sequence> sequence;
    int drafted = 0;
    TokenSource source = TokenSource::lookahead;
    int chain = 0;  // of the accepted drafts, how many from the first on were first choices; others are of a tree
    int last = 0;   // the row of the last accepted draft
    std::vector<Token> tokens;
};

// The result for `sequence` in `slot`, whose window held `drafted` drafts from `source`. logprobs: of the whole pass;
// null where it has none. Changes nothing.
StepResult step_result_of(const std::shared_ptr<Sequence>& sequence, std::size_t slot, int drafted, TokenSource source,
                          const Emitted& emitted, const Logprobs* logprobs);

}  // namespace pass
