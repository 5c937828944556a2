#include "prompts.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <iostream>

#include "utf8.h"

namespace pass::cli {

namespace {

constexpr const char* standard_input = "-";
constexpr const char* byte_order_mark = "\xef\xbb\xbf";

std::optional<std::string> read_standard_input() {
    if (fcntl(STDIN_FILENO, F_GETFD) < 0)
        throw Error("standard input is closed: give the prompt in another way");
    if (isatty(STDIN_FILENO) != 0)
        std::cerr << "reading the prompt from the terminal; end with Ctrl-D" << std::endl;
    return read_bytes(stdin);
}

// The UTF-8 text of a file or of standard input, without a byte order mark.
std::string read_text(const std::string& path) {
    const bool standard = path == standard_input;
    const std::string name = standard ? "standard input" : path;
    const std::optional<std::string> text = standard ? read_standard_input() : read_file(path);
    if (!text) throw Error("cannot read the prompt from " + name + ": " + std::strerror(errno));
    if (lossy_utf8(*text) != *text) throw Error("the prompt in " + name + " is not UTF-8 text");
    return text->starts_with(byte_order_mark) ? text->substr(std::strlen(byte_order_mark)) : *text;
}

}  // namespace

void PromptFlags::add_to(CLI::App& command) {
    command.add_option("-p,--prompt", prompt, "The prompt.");
    command.add_option("--prompt-file", file,
                       "UTF-8 file with the prompt, or `-` for standard input; a line feed at its "
                       "end is removed.");
    command.add_flag("--keep-newline", keep_newline,
                     "Keep the line feed at the end of the file or of standard input.");
    command.add_option("--prompt-ids", ids,
                       "The prompt's token ids, as 1,2,3. Token ids are printed, not text.");
}

std::optional<std::string> PromptFlags::read() const {
    if (prompt && file) throw Error("give the prompt with -p or with --prompt-file, not both");
    if (ids && (prompt || file))
        throw Error("give the prompt with --prompt-ids or as text, not both");
    if ((prompt || ids) && keep_newline) {
        throw Error("--keep-newline is for prompts from a file or standard input: " +
                    std::string(prompt ? "-p" : "--prompt-ids") + " is taken as it is");
    }
    if (ids) return std::nullopt;
    if (prompt) return prompt;
    std::string text = read_text(file ? *file : standard_input);
    if (keep_newline || !text.ends_with('\n')) return text;
    text.resize(text.size() - (text.ends_with("\r\n") ? 2 : 1));
    return text;
}

std::vector<std::int64_t> parse_ids(const std::string& flag, const std::string& text) {
    const auto wrong = [&] {
        return Error(flag + " must list token ids, as in 1,2,3, not '" + text + "'");
    };
    std::vector<std::int64_t> ids;
    const char *next = text.data(), *end = next + text.size();
    bool id_expected = true;  // at the beginning, and after a comma
    while (next < end) {
        if (*next == ' ') {
            ++next;
        } else if (*next == ',') {
            if (id_expected) throw wrong();
            id_expected = true;
            ++next;
        } else {
            const auto [stop, error] = std::from_chars(next, end, ids.emplace_back());
            if (error != std::errc() || (stop < end && *stop != ',' && *stop != ' ')) throw wrong();
            id_expected = false;
            next = stop;
        }
    }
    if (id_expected) throw wrong();
    return ids;
}

std::vector<std::int64_t> encode(const Tokenizer& tokenizer, const Bundle& bundle,
                                 const std::string& text) {
    std::vector<std::int64_t> ids = tokenizer.encode(text);
    if (!ids.empty()) return ids;
    if (bundle.bos_token_id()) return {*bundle.bos_token_id()};
    if (bundle.eos_token_ids().empty())
        throw Error("the prompt is empty and the model has no start token; give it some text");
    return {bundle.eos_token_ids().front()};
}

}  // namespace pass::cli
