#include "output.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <iostream>
#include <string>

namespace pass::cli {

namespace {

// How tokens of a source are shown.
struct Style {
    TokenSource source;
    const char* colour;  // null: the terminal's own
    const char* name;
};

constexpr std::array<Style, 3> styles{{{TokenSource::model, nullptr, "the model's own"},
                                       {TokenSource::lookahead, "\x1b[32m", "look-ahead drafts"},
                                       {TokenSource::ngram, "\x1b[36m", "n-gram drafts"}}};
constexpr const char *dim = "\x1b[2m", *reset = "\x1b[0m";

// `text` in `colour`, if `file` (a file descriptor) is a terminal.
std::string coloured(const std::string& text, const char* colour, int file) {
    if (colour == nullptr || text.empty() || isatty(file) == 0) return text;
    return colour + text + reset;
}

const Style& style_of(TokenSource source) {
    for (const Style& style : styles) {
        if (style.source == source) return style;
    }
    return styles.front();
}

// One line: how many tokens came from each source, in its colour.
std::string legend(const std::vector<Token>& tokens) {
    std::string line;
    for (const Style& style : styles) {
        const auto count = std::count_if(tokens.begin(), tokens.end(), [&](const Token& token) {
            return token.source == style.source;
        });
        if (count == 0) continue;
        const std::string text = std::to_string(count) + " " + style.name;
        line += (line.empty() ? "" : ", ") + coloured(text, style.colour, STDERR_FILENO);
    }
    return line.empty() ? "no tokens" : line;
}

std::string summary(const Generation& generation) {
    const Stats stats = generation.stats();
    std::array<char, 256> line{};
    std::snprintf(line.data(), line.size(),
                  "[%lld tokens, %.1f tokens/s, plan %s, tau %.2f, prefill %.0f ms of %lld tokens, "
                  "finished by %s]",
                  static_cast<long long>(stats.generated_tokens), stats.decode_tokens_per_second(),
                  stats.plan.c_str(), stats.tau(), 1e3 * stats.prefill_seconds,
                  static_cast<long long>(stats.prompt_tokens - stats.cached_tokens),
                  name_of(generation.finish_reason().value_or(FinishReason::error)));
    return line.data();
}

}  // namespace

void print(const Event& event, bool as_text, bool show_drafts) {
    std::string shown;
    for (const Token& token : event.tokens) {
        const char* colour = show_drafts ? style_of(token.source).colour : nullptr;
        shown += coloured(as_text ? token.text : std::to_string(token.id), colour, STDOUT_FILENO) +
                 (as_text ? "" : " ");
    }
    // The last event may have text and no tokens.
    std::cout << (as_text && shown.empty() ? event.text : shown) << std::flush;
}

void print_summary(const Generation& generation, bool show_drafts) {
    if (show_drafts) std::cerr << "[" << legend(generation.tokens()) << "]" << std::endl;
    if (isatty(STDERR_FILENO) != 0) std::cerr << dim << summary(generation) << reset << std::endl;
}

}  // namespace pass::cli
