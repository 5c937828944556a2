// pass-cpp replay: decodes requests that the Python runtime decoded, and compares the results to the last bit.
#include <iostream>
#include <memory>

#include "options.h"
#include "scenes.h"

namespace pass::cli {

namespace {

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
        EngineFlags engine = flags.engine;
        if (scene.contains("capacity") && !scene["capacity"].is_null())
            engine.capacity = scene["capacity"].get<std::int64_t>();
        if (scene.contains("speculative_max_concurrency"))
            engine.options.speculative_max_concurrency = scene["speculative_max_concurrency"].get<std::int64_t>();
        engine.options.acceptance_threshold = scene.value("acceptance_threshold", 0.0);
        engine.read_anew = engine.read_anew || !scene.value("prefix_cache", true);
        Session session = engine.open(scene.at("slots").get<int>());
        const std::vector<Json> results = play(scene, session);
        if (flags.print) std::cout << Json(results).dump() << std::endl;
        differing += compare(scene, results, std::cout);
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
    check_values(*command);
    command->callback([flags] { replay(*flags); });
}

}  // namespace pass::cli
