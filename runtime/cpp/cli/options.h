// The flags that several commands share, and how the library's options are made of them.
#pragma once

#include <CLI/CLI.hpp>

#include <optional>
#include <string>
#include <vector>

#include "pass/pass.hpp"

namespace pass::cli {

// The bundle to open, and how it is opened.
struct EngineFlags {
    std::string bundle;
    LoadOptions options;  // all but what the next two fields and `slots` set
    bool trust_bundle = false, no_prefix_cache = false, verbose = false;

    void add_to(CLI::App& command);
    // Open the bundle, and write warnings to standard error, and if `verbose` more than warnings.
    // slots: how many sequences are decoded together.
    Session open(int slots = 1) const;
};

struct SamplingFlags {
    SamplingParams sampling;  // without the seed and the biases
    std::optional<std::string> seed;
    std::vector<std::string> biases;  // TOKEN=BIAS

    void add_to(CLI::App& command);
    // Throws Error if the seed or a bias is wrong.
    SamplingParams params() const;
};

// Make `command` refuse empty values, which CLI11 takes for 0, and numbers out of range, and read
// 010 as 10. Call it after adding all options.
void check_values(CLI::App& command);

// Add the commands to `app`.
void add_generate(CLI::App& app);
void add_bench(CLI::App& app);

}  // namespace pass::cli
