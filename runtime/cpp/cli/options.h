// Flags that several commands share, and the library's options that follow from them.
#pragma once

#include <CLI/CLI.hpp>

#include <optional>
#include <string>
#include <vector>

#include "pass/pass.hpp"

namespace pass::cli {

// --device --threads --capacity --trust-bundle --no-weight-cache --no-prefix-cache --speculative-max-concurrency
// --onnxruntime --tensorrt --plugin --plugin-library
struct EngineFlags {
    std::string bundle;
    LoadOptions options;
    std::optional<std::int64_t> capacity;
    bool trust = false;
    bool pack_anew = false;
    bool read_anew = false;

    void add_to(CLI::App& command);
    Session open(int slots = 1) const;
};

// --temperature --top-k --top-p --min-p --seed --presence-penalty --frequency-penalty --repetition-penalty --logit-bias
struct SamplingFlags {
    SamplingParams sampling;
    std::optional<std::string> seed;
    std::vector<std::string> biases;

    void add_to(CLI::App& command);
    SamplingParams params() const;
};

// To be called after all options were added: refuses values that CLI11 would accept, such as an empty one for 0 and
// numbers that do not fit, and reads 010 as 10.
void check_values(CLI::App& command);

// Each adds one command to the app.
void add_generate(CLI::App& app);
void add_bench(CLI::App& app);

}  // namespace pass::cli
