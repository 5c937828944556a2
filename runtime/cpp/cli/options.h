// Flags that several commands share, and their way into the library's options.
#pragma once

#include <CLI/CLI.hpp>

#include <optional>
#include <string>
#include <vector>

#include "pass/pass.hpp"

namespace pass::cli {

// --device --threads --capacity --trust-bundle --onnxruntime --plugin
struct EngineFlags {
    std::string bundle;
    LoadOptions options;
    std::optional<std::int64_t> capacity;
    bool trust = false;

    void add_to(CLI::App& command);
    Session open(int slots = 1) const;
};

// --temperature --top-k --top-p --min-p --seed
struct SamplingFlags {
    SamplingParams sampling;
    std::optional<std::string> seed;

    void add_to(CLI::App& command);
    SamplingParams params() const;
};

// The lines of a file. Throws Error where it cannot be read.
std::vector<std::string> read_lines(const std::string& path);

// Every command: adds itself to the app.
void add_generate(CLI::App& app);
void add_bench(CLI::App& app);
void add_replay(CLI::App& app);

}  // namespace pass::cli
