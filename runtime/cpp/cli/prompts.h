// Where prompts come from: flags, files, standard input; `-` names standard input.
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
    // One of them, or standard input: the text; none where there are token ids. Throws Error where there are two, and
    // where a file cannot be read or is not UTF-8. A file's last line feed is not part of the prompt.
    std::optional<std::string> read() const;
};

// "1,2,3" or "1 2 3" -> token ids. Throws Error where it is something else.
std::vector<std::int64_t> parse_ids(const std::string& flag, const std::string& text);

// With the tokenizer's own special tokens; an empty text becomes the model's start token.
std::vector<std::int64_t> encode(const Tokenizer& tokenizer, const Bundle& bundle, const std::string& text);

}  // namespace pass::cli
