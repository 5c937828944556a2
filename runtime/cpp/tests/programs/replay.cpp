// For tests/cpp and by hand: replay BUNDLE TRACES [THREADS] repeats, on the CPU, the requests that
// tests/cpp/golden_traces.py recorded, and compares the results to the last bit. It ends with
// status 1 if they differ.
#include <cstdlib>
#include <iostream>

#include "scenes.h"

using namespace pass;
using namespace pass::test;

namespace {

int replay(const std::string& bundle, const std::string& traces, int threads) {
    const std::vector<Json> scenes = read_scenes(traces);
    std::size_t requests = 0;
    int differing = 0;
    for (const Json& scene : scenes) {
        LoadOptions options = options_of(scene);
        options.device = "cpu";
        options.threads = threads;
        options.verify = false;
        Session session = Session::load(bundle, options);
        const std::vector<Json> results = play(scene, session);
        differing += compare(scene, results, std::cout);
        requests += results.size();
    }
    std::cout << scenes.size() << " scenes, " << requests << " requests: "
              << (differing == 0 ? "equal" : std::to_string(differing) + " differences")
              << std::endl;
    return differing == 0 ? 0 : 1;
}

}  // namespace

int main(int count, char** words) {
    if (count < 3) {
        std::cerr << "usage: replay BUNDLE TRACES [THREADS]" << std::endl;
        return 2;
    }
    try {
        return replay(words[1], words[2], count > 3 ? std::atoi(words[3]) : 1);
    } catch (const std::exception& error) {
        std::cerr << "error: " << error.what() << std::endl;
        return 2;
    }
}
