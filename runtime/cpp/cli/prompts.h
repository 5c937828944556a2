// Reads prompts from flags, files and standard input (the path `-`).
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pass/pass.hpp"

namespace pass::cli {

// -p --prompt-file --keep-newline --prompt-ids
struct PromptFlags {
    std::optional<std::string> prompt, file, ids;
    bool keep_newline = false;

    void add_to(CLI::App& command);
    // The text of the prompt, from a flag, a file or standard input; none if token ids were given.
    // Unless `keep_newline`, a line end at the end of a file or of standard input is left out.
    // Throws Error if flags exclude each other, or the input cannot be read or is not UTF-8.
    std::optional<std::string> read() const;
};

// The numbers of "1,2,3" or "1 2 3"; none if `text` is not such a list.
std::optional<std::vector<std::int64_t>> parse_numbers(const std::string& text);

// The same for the token ids of `flag`. Throws Error if `text` is no such list.
std::vector<std::int64_t> parse_ids(const std::string& flag, const std::string& text);

// The ids of `text`, with the tokenizer's own special tokens; if these are none, the model's start
// token, or else its end token.
std::vector<std::int64_t> encode(const Tokenizer& tokenizer, const Bundle& bundle,
                                 const std::string& text);

}  // namespace pass::cli
