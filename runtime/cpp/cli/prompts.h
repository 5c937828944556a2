// Reads prompts, from flags, files and standard input (the path `-`), and lists of token ids.
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
    // The text of the prompt, from a flag, a file or standard input; none if token ids were given.
    // Unless `keep_newline`, removes the line end at the end of a file or of standard input. Throws
    // Error if flags exclude each other, or the input cannot be read or is not UTF-8.
    std::optional<std::string> read() const;
};

// The whole numbers of a list such as "1,2,3" or "1 2 3"; none if `text` is no such list.
std::optional<std::vector<std::int64_t>> parse_numbers(const std::string& text);

// The token ids of a list that was given with `flag`. Throws Error if `text` is no such list.
std::vector<std::int64_t> parse_ids(const std::string& flag, const std::string& text);

// The token ids of `text`. If it has none, as an empty text, the id of the model's start token, or
// else of its end token, because a prompt needs a token.
std::vector<std::int64_t> encode(const Tokenizer& tokenizer, const Bundle& bundle,
                                 const std::string& text);

}  // namespace pass::cli
