// What a byte-level tokenizer.json says of its tokens: the bytes that each stands for, and which are special.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pass {

class Vocabulary {
   public:
    // `text` is the file's. Throws Error, without the file's name, where its tokens are not those of a byte-level
    // tokenizer, or its post-processor does more than to add special tokens at either end.
    explicit Vocabulary(const std::string& text);

    // Nothing for a special token, and for an id that is none.
    const std::string& bytes(std::int64_t token) const;
    // The special token that `text` is, -1 where it is none.
    std::int64_t special(const std::string& text) const;
    // What a special token is called; "" for any other.
    const std::string& special_text(std::int64_t token) const;
    // Special tokens that a prompt begins and ends with.
    const std::vector<std::int64_t>& before() const { return before_; }
    const std::vector<std::int64_t>& behind() const { return behind_; }
    // Parts of a text that are encoded each by itself, in this order.
    struct Part {
        std::string text;
        std::int64_t token = -1;  // what it is, where it is a token that was added to the vocabulary
    };
    std::vector<Part> split(const std::string& text) const;

   private:
    enum class Digits { as_letters, in_runs, one_by_one };

    std::unordered_map<std::int64_t, std::string> bytes_, special_;
    std::vector<std::pair<std::string, std::int64_t>> added_;  // the longest first
    Digits digits_ = Digits::as_letters;
    std::vector<std::int64_t> before_, behind_;
};

}  // namespace pass
