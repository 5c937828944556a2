// For tests/cpp and by hand: prints the time of a pass outside the engine, in microseconds: the
// median over ROUNDS of the time of a batch of requests divided by its passes.
//
//     host_time [TOKENS [ROUNDS]]
//
// The backend has no model (reciting.h), so the time is spent on choosing plans, staging windows,
// n-gram drafts, statistics and events. No tokens are turned into text.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "reciting.h"

using namespace pass;
using namespace pass::test;

namespace {

struct Kind {
    const char *name, *plan, *draft;
    double temperature;
};

// Microseconds per pass of `batch` requests of a kind. passes: a counter of the backend's passes.
double microseconds(Core& core, std::int64_t& passes, const Kind& kind, int batch,
                    std::int64_t tokens) {
    Request sent = request(1, tokens, kind.plan);
    if (*kind.draft != '\0') sent.options.draft = kind.draft;
    sent.options.sampling.temperature = kind.temperature;
    sent.options.sampling.seed = 1;
    passes = 0;
    const auto started = std::chrono::steady_clock::now();
    std::vector<std::shared_ptr<SequenceState>> sequences;
    for (int i = 0; i < batch; ++i) sequences.push_back(core.submit(sent, nullptr));
    for (const auto& sequence : sequences) read_all(core, *sequence);
    const std::chrono::duration<double, std::micro> taken =
        std::chrono::steady_clock::now() - started;
    return taken.count() / static_cast<double>(passes);
}

}  // namespace

int main(int argc, char** argv) {
    const std::int64_t tokens = argc > 1 ? std::atoll(argv[1]) : 256;
    const int rounds = argc > 2 ? std::max(std::atoi(argv[2]), 1) : 7;
    const Kind kinds[] = {{"ar", "ar", "", 0},
                          {"two-pass", "two-pass", "", 0},
                          {"fused", "fused", "", 0},
                          {"fused, T=0.8", "fused", "", 0.8},
                          {"fused and n-grams", "fused", "both", 0},
                          {"auto", "auto", "", 0}};
    for (const int batch : {1, 8}) {
        std::int64_t passes = 0;
        RecitingBackend* backend = nullptr;
        const auto core = reciting_core(batch, &backend, nullptr, 1024, 4096);
        backend->before_pass = [&] { ++passes; };
        core->warm_up({});
        for (const Kind& kind : kinds) {
            std::vector<double> times;
            for (int round = 0; round < rounds; ++round)
                times.push_back(microseconds(*core, passes, kind, batch, tokens));
            std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
            std::printf("batch %d  %-17s %6.1f us\n", batch, kind.name,
                        times[static_cast<std::size_t>(rounds / 2)]);
        }
        core->close();
    }
}
