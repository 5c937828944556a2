// Flags that several commands share, and the library's options that follow from them.
#pragma once

#include <CLI/CLI.hpp>

#include <optional>
#include <string>
#include <vector>

#include "pass/pass.hpp"

namespace pass::cli {

// --device --threads --capacity --trust-bundle --no-weight-cache --no-prefix-cache
// --speculative-max-concurrency --onnxruntime --tensorrt --plugin --plugin-library
struct EngineFlags {
    std::string bundle;
    LoadOptions options;
    bool trust_bundle = false, no_weight_cache = false, no_prefix_cache = false;

    void add_to(CLI::App& command);
    Session open(int slots = 1) const;
};

// --temperature --top-k --top-p --min-p --seed --presence-penalty --frequency-penalty
// --repetition-penalty --logit-bias
struct SamplingFlags {
    SamplingParams sampling;
    std::optional<std::string> seed;
    std::vector<std::string> biases;

    void add_to(CLI::App& command);
    SamplingParams params() const;
};

// Makes `command` refuse empty values, which CLI11 takes for 0, and numbers that do not fit, and
// read 010 as 10. Call it after adding all options.
void check_values(CLI::App& command);

// Each adds one command to `app`.
void add_generate(CLI::App& app);
void add_bench(CLI::App& app);

}  // namespace pass::cli
