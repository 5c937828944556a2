#include "decode/step_result.h"

#include <algorithm>

namespace pass {

namespace {

TokenLogprobs logprobs_of(const Logprobs& logprobs, std::size_t slot, std::size_t place, int count) {
    const std::size_t row = slot * logprobs.emitted + place;
    TokenLogprobs found{logprobs.chosen[row], {}};
    for (std::size_t i = 0; i < std::min(static_cast<std::size_t>(count), logprobs.most); ++i) {
        const std::size_t at = row * logprobs.most + i;
        found.top.emplace_back(logprobs.ids[at], logprobs.values[at]);
    }
    return found;
}

}  // namespace

StepResult step_result_of(const std::shared_ptr<Sequence>& sequence, std::size_t slot, int drafted, TokenSource source,
                          const Emitted& emitted, const Logprobs* logprobs) {
    const std::vector<std::int64_t>& ids = emitted.tokens;
    StepResult result{sequence, drafted, source, 0, static_cast<int>(emitted.rows.back()), {}};
    while (result.chain + 1 < static_cast<int>(emitted.rows.size()) &&
           emitted.rows[static_cast<std::size_t>(result.chain) + 1] == result.chain + 1) {
        ++result.chain;
    }
    for (std::size_t i = 0; i < ids.size(); ++i) {
        Token token{ids[i], i + 1 < ids.size() ? source : TokenSource::model, std::nullopt, ""};
        const std::optional<int>& count = sequence->request.logprobs;
        if (logprobs != nullptr && count) token.logprobs = logprobs_of(*logprobs, slot, i, *count);
        result.tokens.push_back(std::move(token));
    }
    return result;
}

}  // namespace pass
