#include "json.h"

namespace pass::cli {

namespace {

Json to_json(const StopReason& stop) {
    if (const auto* token = std::get_if<std::int64_t>(&stop)) return *token;
    if (const auto* text = std::get_if<std::string>(&stop)) return *text;
    return nullptr;
}

Json logprobs_of(const Generation& generation) {
    Json result = Json::array();
    for (const Token& token : generation.tokens()) {
        if (!token.logprobs) continue;
        Json top = Json::array();
        for (const auto& [id, logprob] : token.logprobs->top)
            top.push_back({id, static_cast<double>(logprob)});
        result.push_back({{"token", token.id},
                          {"logprob", static_cast<double>(token.logprobs->logprob)},
                          {"top", std::move(top)}});
    }
    return result;
}

}  // namespace

Json to_json(const Stats& stats) {
    return {{"plan", stats.plan},
            {"lookahead", stats.lookahead},
            {"prompt_tokens", stats.prompt_tokens},
            {"cached_tokens", stats.cached_tokens},
            {"generated_tokens", stats.generated_tokens},
            {"passes", stats.passes},
            {"tau", stats.tau()},
            {"steps", stats.steps},
            {"drafted", stats.drafted},
            {"accepted", stats.accepted},
            {"mean_acceptance_length", stats.mean_acceptance_length()},
            {"draft_acceptance_rate", stats.draft_acceptance_rate()},
            {"acceptance_histogram", stats.acceptance_histogram()},
            {"acceptance_per_position", stats.acceptance_per_position()},
            {"queue_seconds", stats.queue_seconds},
            {"prefill_seconds", stats.prefill_seconds},
            {"decode_seconds", stats.decode_seconds},
            {"engine_seconds", stats.engine_seconds},
            {"decode_tokens_per_second", stats.decode_tokens_per_second()}};
}

Json to_json(const Generation& generation) {
    Json result{{"prompt_ids", generation.prompt_ids()},
                {"token_ids", generation.token_ids()},
                {"text", generation.text()},
                {"finish_reason",
                 generation.finish_reason() ? Json(name_of(*generation.finish_reason())) : Json()},
                {"stop_reason", to_json(generation.stop_reason())},
                {"seed", generation.seed()},
                {"stats", to_json(generation.stats())}};
    if (generation.logprobs()) result["logprobs"] = logprobs_of(generation);
    return result;
}

}  // namespace pass::cli
