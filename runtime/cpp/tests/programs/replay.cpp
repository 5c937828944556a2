// For tests/cpp and by hand: replay BUNDLE TRACES [THREADS] repeats, on the CPU, the requests that
// tests/cpp/golden_traces.py recorded, and compares all bits of the results. Status 1: they differ.
#include <cstdlib>
#include <iostream>

#include "scenes.h"

using namespace pass;
using namespace pass::test;

namespace {

int replay(const std::string& bundle, const std::string& traces, int threads) {
    const std::vector<Json> scenes = read_scenes(traces);
    std::size_t num_requests = 0;
    int num_differences = 0;
    for (const Json& scene : scenes) {
        LoadOptions options = options_of(scene);
        options.device = "cpu";
        options.threads = threads;
        options.verify = false;
        Session session = Session::load(bundle, options);
        const std::vector<Json> results = play(scene, session);
        num_differences += compare(scene, results, std::cout);
        num_requests += results.size();
    }
    std::cout << scenes.size() << " scenes, " << num_requests << " requests: "
              << (num_differences == 0 ? "equal" : std::to_string(num_differences) + " differences")
              << std::endl;
    return num_differences == 0 ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 3) {
        std::cerr << "usage: replay BUNDLE TRACES [THREADS]" << std::endl;
        return 2;
    }
    try {
        return replay(arguments[1], arguments[2], count > 3 ? std::atoi(arguments[3]) : 1);
    } catch (const std::exception& error) {
        std::cerr << "error: " << error.what() << std::endl;
        return 2;
    }
}
