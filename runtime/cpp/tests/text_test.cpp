#include "catch.hpp"
#include "errors.h"
#include "text/text_stream.h"
#include "text/vocabulary.h"
#include "utf8.h"

namespace {

// "é" has the two bytes C3 A9, which GPT-2 writes as "Ã" and "©"; "Ġ" is a space.
const std::string tokenizer = R"({
    "model": {"type": "BPE", "vocab": {"a": 2, "b": 3, "Ã": 4, "©": 5, "Ġc": 6, "1": 7}},
    "decoder": {"type": "ByteLevel"},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true}]},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
                       "special_tokens": {"<s>": {"ids": [0]}}},
    "added_tokens": [{"id": 0, "content": "<s>", "special": true}, {"id": 1, "content": "</s>", "special": true}]})";

struct Reading {
    std::string text;  // the text that each token returned, and "|" after it
    std::optional<std::string> stop;
};

Reading read(const std::vector<std::int64_t>& tokens, const std::vector<std::string>& stops = {}) {
    pass::TextStream stream(std::make_shared<pass::Vocabulary>(tokenizer), stops);
    Reading result;
    for (const std::int64_t token : tokens) {
        result.text += stream.read(token, result.stop) + "|";
        if (result.stop) return result;
    }
    result.text += stream.flush();
    return result;
}

}  // namespace

TEST_CASE("incomplete characters are held back") {
    CHECK(read({2, 4, 5, 6}).text == "a||\xC3\xA9| c|");
    CHECK(read({4, 2}).text ==
          "|\xEF\xBF\xBD"
          "a|");
    CHECK(read({2, 4}).text == "a||");
}

TEST_CASE("special tokens and unknown ids are not shown") {
    CHECK(read({0, 2, 1, 99, 3}).text == "|a|||b|");
}

TEST_CASE("stop strings end the text") {
    CHECK(read({2, 3, 2, 2}, {"ba"}).text == "a|||");
    CHECK(read({2, 3, 2, 2}, {"ba"}).stop == "ba");
    CHECK(read({2, 3}, {"bx"}).text == "a||b");
    CHECK(read({2, 3, 6}, {"b c", "ab"}).stop == "ab");
    CHECK(read({2, 1, 3}, {"</s>"}).stop == "</s>");
}

TEST_CASE("the stop string that is complete first ends the text; of several, the longest") {
    pass::StopFilter filter({"bc", "abcd", "abc", ""});
    std::optional<std::string> stop;
    CHECK(filter.push("xabcd", stop) == "x");
    CHECK(stop == "abc");
    CHECK(filter.flush().empty());
}

TEST_CASE("a stop string within the first min_tokens tokens does not end the text") {
    const auto vocabulary = std::make_shared<pass::Vocabulary>(tokenizer);
    pass::TextStream stream(vocabulary, {"b", "</s>"}, {}, 2);
    std::string text;
    std::optional<std::string> stop;
    for (const std::int64_t token : {3, 1, 2}) text += stream.read(token, stop);
    CHECK(text == "ba");
    CHECK(!stop);
    CHECK(stream.read(3, stop).empty());
    CHECK(stop == "b");
}

TEST_CASE("a character that begins in the prompt is shown with the token that completes it") {
    const auto vocabulary = std::make_shared<pass::Vocabulary>(tokenizer);
    std::optional<std::string> stop;
    CHECK(pass::TextStream(vocabulary, {}, {2, 4}).read(5, stop) == "\xC3\xA9");
    CHECK(pass::TextStream(vocabulary, {}, {2, 4}).read(2, stop) == "a");
}

TEST_CASE("with byte fallback every stray byte is shown, and the first space is left out") {
    const std::string bytes = R"({
        "model": {"type": "BPE", "vocab": {"<0xE2>": 2, "<0x82>": 3, "<0xaC>": 4, "▁a": 5, "<0x4G>": 6}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "added_tokens": [{"id": 0, "content": "<s>", "special": true, "rstrip": true}]})";
    const auto vocabulary = std::make_shared<pass::Vocabulary>(bytes);
    pass::TextStream stream(vocabulary, {}, {0});
    std::string text;
    std::optional<std::string> stop;
    for (const std::int64_t token : {5, 2, 3, 4, 2, 3, 5, 4, 6})
        text += stream.read(token, stop) + "|";
    CHECK(text == "a|||\xE2\x82\xAC|||\xEF\xBF\xBD\xEF\xBF\xBD a|\xEF\xBF\xBD|<0x4G>|");
}

TEST_CASE("texts are split at added tokens and at digits") {
    const pass::Vocabulary vocabulary(tokenizer);
    std::string parts;  // "!" marks added tokens; D9 A3 is the Arabic digit three
    for (const auto& part : vocabulary.split("a12 </s>\xD9\xA3 b"))
        parts += part.text + (part.token >= 0 ? "!" : "") + "|";
    CHECK(parts == "a|1|2| |</s>!|\xD9\xA3| b|");
    CHECK(vocabulary.split("").empty());
    CHECK(vocabulary.prefix() == std::vector<std::int64_t>{0});
    CHECK(pass::split_digits("12a3", false) == std::vector<std::string>{"12", "a", "3"});
}

TEST_CASE("tokenizers of another kind are refused") {
    CHECK_THROWS_AS(pass::Vocabulary("{"), pass::Error);
    CHECK_THROWS_AS(pass::Vocabulary(R"({"model": {"type": "Unigram"}})"), pass::Error);
    CHECK_THROWS_AS(pass::Vocabulary(R"({"model": {"type": "BPE", "vocab": []}, "decoder": null})"),
                    pass::Error);
}

TEST_CASE("bytes that are no character become U+FFFD, as in Rust") {
    CHECK(pass::lossy_utf8("a\xE2\x82") == "a\xEF\xBF\xBD");
    CHECK(pass::lossy_utf8("\xF0\x9F\x98g\xFF") == "\xEF\xBF\xBDg\xEF\xBF\xBD");
}
