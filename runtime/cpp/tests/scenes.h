// Replays requests that the Python runtime decoded: scenes, which tests/cpp/golden_traces.py
// writes. A request is submitted before the step "round", and cancelled before the step
// "cancel_round". If "compare" is "tokens", only tokens and the reasons of ends are compared.
#pragma once

#include <fstream>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "json.h"

namespace pass::test {

using cli::Json;

inline constexpr const char* times[] = {"queue_seconds", "prefill_seconds", "decode_seconds",
                                        "engine_seconds", "decode_tokens_per_second"};

template <class Value>
void take(const Json& from, const char* key, Value& into) {
    if (from.contains(key) && !from[key].is_null()) into = from[key].get<Value>();
}

template <class Value>
void take(const Json& from, const char* key, std::optional<Value>& into) {
    if (from.contains(key) && !from[key].is_null()) into = from[key].get<Value>();
}

inline Request request_of(const Json& line) {
    Request request;
    take(line, "prompt_ids", request.prompt_ids);
    GenerateOptions& options = request.options;
    take(line, "max_new_tokens", options.max_new_tokens);
    take(line, "plan", options.plan);
    take(line, "draft", options.draft);
    take(line, "lookahead", options.lookahead);
    take(line, "stop_token_ids", options.stop_token_ids);
    take(line, "ignore_eos", options.ignore_eos);
    take(line, "reuse_prefix", options.reuse_prefix);
    take(line, "cache_salt", options.cache_salt);
    take(line, "logprobs", options.logprobs);
#define TAKE(type, name, ...) take(line, #name, options.sampling.name);
    PASS_SAMPLING_FIELDS(TAKE)
#undef TAKE
    take(line, "seed", options.sampling.seed);
    take(line, "min_tokens", options.min_tokens);
    take(line, "allowed_token_ids", options.allowed_token_ids);
    if (line.contains("logit_bias")) {
        for (const auto& [token, bias] : line["logit_bias"].items())
            options.sampling.logit_bias[std::stoll(token)] = bias.get<double>();
    }
    return request;
}

inline Json result_of(Generation& generation) {
    generation.run();
    Json result = cli::to_json(generation);
    for (const char* key : {"prompt_ids", "text", "seed"}) result.erase(key);
    for (const char* key : times) result["stats"].erase(key);
    Json sources = Json::array();
    for (const Token& token : generation.tokens()) sources.push_back(name_of(token.source));
    result["sources"] = std::move(sources);
    return result;
}

inline std::vector<Json> play(const Json& scene, Session& session) {
    const Json& requests = scene.at("requests");
    std::vector<std::unique_ptr<Generation>> generations(requests.size());
    bool work_left = true;
    for (int step = 0; work_left; ++step) {
        work_left = false;
        for (std::size_t i = 0; i < requests.size(); ++i) {
            const int first_step = requests[i].value("round", 0);
            if (first_step == step)
                generations[i] =
                    std::make_unique<Generation>(session.submit(request_of(requests[i])));
            if (requests[i].value("cancel_round", -1) == step) generations[i]->cancel();
            work_left = work_left || first_step > step;
        }
        work_left = session.step() || work_left;
    }
    std::vector<Json> results;
    results.reserve(generations.size());
    for (const auto& generation : generations) results.push_back(result_of(*generation));
    return results;
}

// Writes the fields that differ in any bit. Returns how many there are.
inline int compare(const Json& scene, const std::vector<Json>& results, std::ostream& differences) {
    const bool tokens_only = scene.value("compare", "all") == "tokens";
    int num_differences = 0;
    for (std::size_t i = 0; i < results.size(); ++i) {
        const Json& expected = scene.at("results").at(i);
        for (const auto& [key, value] : expected.items()) {
            if (tokens_only && key != "token_ids" && key != "finish_reason" && key != "stop_reason")
                continue;
            // Equal in any order of their keys.
            const nlohmann::json wanted = value, actual = results[i].value(key, Json());
            if (wanted == actual) continue;
            num_differences += 1;
            differences << scene.at("name").get<std::string>() << ", request " << i << ": " << key
                        << " is " << actual.dump() << ", not " << wanted.dump() << std::endl;
        }
    }
    return num_differences;
}

inline std::vector<Json> read_scenes(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw Error("cannot read " + path + ": is it there, and a file?");
    std::vector<Json> scenes;
    for (std::string line; std::getline(file, line);) {
        scenes.push_back(Json::parse(line, nullptr, false));
        if (scenes.back().is_object()) continue;
        throw Error(path + ", line " + std::to_string(scenes.size()) + ": not a JSON object");
    }
    return scenes;
}

inline LoadOptions options_of(const Json& scene) {
    LoadOptions options;
    options.max_batch_size = scene.value("slots", 1);
    take(scene, "capacity", options.capacity);
    take(scene, "speculative_max_concurrency", options.speculative_max_concurrency);
    take(scene, "prefix_cache", options.prefix_cache);
    return options;
}

// Collects the library's messages.
class Messages {
   public:
    explicit Messages(LogLevel min_level = LogLevel::warning) {
        set_log(
            [this](LogLevel, const std::string& message) {
                const std::lock_guard lock(mutex_);
                messages_.push_back(message);
            },
            min_level);
    }
    ~Messages() { set_log({}); }

    std::vector<std::string> take() {
        const std::lock_guard lock(mutex_);
        return std::exchange(messages_, {});
    }

   private:
    std::mutex mutex_;
    std::vector<std::string> messages_;
};

}  // namespace pass::test
