// What a tokenizer.json says.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pass {

// Into runs of digits (one_by_one: single digits) and the text between them, as the pre-tokenizer
// Digits does.
std::vector<std::string> split_digits(std::string_view text, bool one_by_one);

class Vocabulary {
   public:
    // Throws Error unless `text` is a byte-level tokenizer whose post-processor only adds special
    // tokens at either end, or a tokenizer with byte fallback.
    explicit Vocabulary(const std::string& text);

    // Empty for special tokens and unknown ids.
    const std::string& bytes(std::int64_t token) const;
    // Each byte of an incomplete character is then shown as U+FFFD, and `split`, `prefix` and
    // `suffix` must not be used.
    bool byte_fallback() const { return byte_fallback_; }
    // The most spaces that are removed from a text's beginning.
    std::size_t stripped_spaces() const { return stripped_spaces_; }
    // The id of the special token with this name, or -1.
    std::int64_t special(const std::string& text) const;
    // Special tokens around a prompt.
    const std::vector<std::int64_t>& prefix() const { return prefix_; }
    const std::vector<std::int64_t>& suffix() const { return suffix_; }
    // A part of a text that is encoded by itself.
    struct Part {
        std::string text;
        std::int64_t token = -1;  // its id, if it is an added token
    };
    std::vector<Part> split(const std::string& text) const;

   private:
    enum class Digits { as_letters, in_runs, one_by_one };

    bool byte_fallback_ = false;
    std::size_t stripped_spaces_ = 0;
    std::unordered_map<std::int64_t, std::string> bytes_;
    std::unordered_map<std::string, std::int64_t> special_;    // ids of special tokens by name
    std::vector<std::pair<std::string, std::int64_t>> added_;  // texts and ids, the longest first
    Digits digits_ = Digits::as_letters;
    std::vector<std::int64_t> prefix_, suffix_;
};

}  // namespace pass
