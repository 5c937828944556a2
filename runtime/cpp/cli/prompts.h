// Reads prompts, from flags, files and standard input.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pass/pass.hpp"

namespace pass::cli {

// The prompt, given in one of three ways, or else on standard input.
struct PromptFlags {
    std::optional<std::string> prompt, file, ids;
    bool keep_newline = false;

    void add_to(CLI::App& command);
    // None if token ids were given. Unless `keep_newline`, without the line end at the end of a
    // file. Throws Error if flags exclude each other, or the input is not UTF-8.
    std::optional<std::string> read() const;
};

// The token ids of a list such as "1,2,3" or "1 2 3", given with `flag`. Throws Error.
std::vector<std::int64_t> parse_ids(const std::string& flag, const std::string& text);

// A text without tokens gets the model's start token, or else its end token.
std::vector<std::int64_t> encode(const Tokenizer& tokenizer, const Bundle& bundle,
                                 const std::string& text);

}  // namespace pass::cli
