// pass-cpp replay: do again what the Python runtime did, and compare to the last bit.
//
// A line of the file is a scene: {"name", "slots", "capacity", "compare", "requests": [{"prompt_ids", "round", ...}],
// "results": [...]}. A request is submitted before the round of its number, and cancelled before its "cancel_round".
// scripts/golden_traces.py writes them.
#include <iostream>
#include <memory>

#include "json.h"
#include "options.h"

namespace pass::cli {

namespace {

constexpr const char* seconds[] = {"queue_seconds", "prefill_seconds", "decode_seconds", "engine_seconds",
                                   "decode_tokens_per_second"};

template <class Value>
void take(const Json& from, const char* key, Value& into) {
    if (from.contains(key) && !from[key].is_null()) into = from[key].get<Value>();
}

template <class Value>
void take(const Json& from, const char* key, std::optional<Value>& into) {
    if (from.contains(key) && !from[key].is_null()) into = from[key].get<Value>();
}

Request request_of(const Json& line) {
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
    take(line, "logprobs", options.logprobs);
    take(line, "temperature", options.sampling.temperature);
    take(line, "top_k", options.sampling.top_k);
    take(line, "top_p", options.sampling.top_p);
    take(line, "min_p", options.sampling.min_p);
    take(line, "seed", options.sampling.seed);
    return request;
}

// What a generation did, but for how long it took.
Json result_of(Generation& generation) {
    generation.run();
    Json found = to_json(generation);
    for (const char* key : {"prompt_ids", "text", "seed"}) found.erase(key);
    for (const char* key : seconds) found["stats"].erase(key);
    Json sources = Json::array();
    for (const Token& token : generation.tokens()) sources.push_back(name_of(token.source));
    found["sources"] = std::move(sources);
    return found;
}

std::vector<Json> play(const Json& scene, const EngineFlags& engine) {
    EngineFlags flags = engine;
    take(scene, "capacity", flags.capacity);
    Session session = flags.open(scene.at("slots").get<int>());
    const Json& requests = scene.at("requests");
    std::vector<std::unique_ptr<Generation>> generations(requests.size());
    bool more = true;
    for (int round = 0; more; ++round) {
        more = false;
        for (std::size_t i = 0; i < requests.size(); ++i) {
            const int begins = requests[i].value("round", 0);
            if (begins == round) generations[i] = std::make_unique<Generation>(session.submit(request_of(requests[i])));
            if (requests[i].value("cancel_round", -1) == round) generations[i]->cancel();
            more = more || begins > round;
        }
        more = session.step() || more;
    }
    std::vector<Json> results;
    for (const auto& generation : generations) results.push_back(result_of(*generation));
    return results;
}

// Prints what differs; returns how much does.
int compare(const Json& scene, const std::vector<Json>& results) {
    const bool tokens_only = scene.value("compare", "all") == "tokens";
    int differing = 0;
    for (std::size_t i = 0; i < results.size(); ++i) {
        const Json& expected = scene.at("results").at(i);
        for (const auto& [key, value] : expected.items()) {
            if (tokens_only && key != "token_ids" && key != "finish_reason" && key != "stop_reason") continue;
            // Objects in any order: the plain kind of JSON compares by key.
            const nlohmann::json wanted = value, found = results[i].value(key, Json());
            if (wanted == found) continue;
            differing += 1;
            std::cout << scene.at("name").get<std::string>() << ", request " << i << ": " << key << " is "
                      << found.dump() << ", not " << wanted.dump() << std::endl;
        }
    }
    return differing;
}

struct Flags {
    EngineFlags engine;
    std::string traces;
    bool print = false;
};

void replay(const Flags& flags) {
    int scenes = 0, requests = 0, differing = 0;
    for (const std::string& line : read_lines(flags.traces)) {
        const Json scene = Json::parse(line, nullptr, false);
        if (!scene.is_object())
            throw Error(flags.traces + ", line " + std::to_string(scenes + 1) + ": not a JSON object");
        const std::vector<Json> results = play(scene, flags.engine);
        if (flags.print) std::cout << Json(results).dump() << std::endl;
        differing += compare(scene, results);
        scenes += 1;
        requests += static_cast<int>(results.size());
    }
    std::cout << scenes << " scenes, " << requests
              << " requests: " << (differing == 0 ? "equal" : std::to_string(differing) + " differences") << std::endl;
    if (differing > 0) throw CLI::RuntimeError(1);
}

}  // namespace

void add_replay(CLI::App& app) {
    CLI::App* command = app.add_subcommand("replay", "Do again what the Python runtime did, and compare.");
    const auto flags = std::make_shared<Flags>();
    flags->engine.add_to(*command);
    command->add_option("traces", flags->traces, "What scripts/golden_traces.py wrote.")->required();
    command->add_flag("--print", flags->print, "Print the results of every scene.");
    command->callback([flags] { replay(*flags); });
}

}  // namespace pass::cli
