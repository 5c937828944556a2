// The manifest's parts: reading, contradictions, hashes. tests/cpp compares the messages with those of Python.

#include "bundle/manifest.h"

#include <filesystem>
#include <fstream>

#include "bundle/consistency.h"
#include "bundle/manifest_read.h"
#include "bundle/sha256.h"
#include "bundle/strict_json.h"
#include "bundle/tensors.h"
#include "catch.hpp"
#include "errors.h"
#include "text_file.h"

namespace {

std::string complaint(const std::string& text) {
    try {
        pass::parse_manifest(text);
    } catch (const pass::Error& error) {
        return error.what();
    }
    return "";
}

std::string problem_of(const std::string& text, void (*read)(const pass::strict::Place&)) {
    const auto document = pass::strict::parse(text);
    pass::strict::Problems problems;
    read(pass::strict::Place(document, problems));
    return problems.count == 0 ? "" : problems.message;
}

void read_capacity(const pass::strict::Place& at) {
    std::int64_t number = 0;
    pass::strict::read_number(at, number, {.min = 4, .multiple_of = 4});
}

void read_name(const pass::strict::Place& at) {
    std::string name;
    pass::strict::read_file_name(at, name);
}

}  // namespace

TEST_CASE("what is not JSON, and what is no manifest") {
    CHECK_THAT(complaint(""), Catch::Matchers::StartsWith("file: Invalid JSON: "));
    CHECK_THAT(complaint("\xEF\xBB\xBF{}"), Catch::Matchers::StartsWith("file: Invalid JSON: "));
    CHECK(complaint(std::string(100000, '[')) == "file: Invalid JSON: recursion limit exceeded");
    CHECK(complaint("[]") == "file: Input should be an object");
    CHECK(complaint("{}") == "format: Field required, and 13 more");
    CHECK(complaint(R"({"format": "pass-bundle", "version": 4, "news": 1})") ==
          "manifest version 4 is not 3 (export again with this version)");
}

TEST_CASE("numbers are integers in their range") {
    CHECK(problem_of("8", read_capacity).empty());
    CHECK(problem_of("8.0", read_capacity) == "Input should be a valid integer");
    CHECK(problem_of("true", read_capacity) == "Input should be a valid integer");
    CHECK(problem_of("6", read_capacity) == "Input should be a multiple of 4");
    CHECK(problem_of("0", read_capacity) == "Input should be greater than or equal to 4");
    CHECK(problem_of("9223372036854775808", read_capacity) == "Input should be a valid integer of at most 2^53");
    CHECK(problem_of("-9223372036854775808", read_capacity) == "Input should be a valid integer of at most 2^53");
}

TEST_CASE("names that leave the bundle are refused") {
    CHECK(problem_of("\"trunk.onnx.data\"", read_name).empty());
    for (const char* name :
         {"\"\"", "\"..\"", "\"../x\"", "\"/etc\"", "\"a/b\"", "\".hidden\"", "\"a b\"", "\"a\\u0000\""}) {
        CHECK_THAT(problem_of(name, read_name), Catch::Matchers::EndsWith("it could point outside the bundle"));
    }
}

TEST_CASE("Python's repr") {
    using pass::strict::parse;
    using pass::strict::repr;
    CHECK(repr(std::string_view("it's")) == "\"it's\"");
    CHECK(repr(std::string_view("'\"\n\x7f\xC3\xA9\xE2\x80\xA8")) == "'\\'\"\\n\\x7f\xC3\xA9\\u2028'");
    CHECK(repr(parse(R"({"a": [null, true, 1, "x"]})")) == "{'a': [None, True, 1, 'x']}");
}

TEST_CASE("paths are those of pathlib") {
    CHECK(pass::plain_path("./a//b/./c/") == "a/b/c");
    CHECK(pass::plain_path("/a/../b/") == "/a/../b");
    CHECK(pass::plain_path("") == ".");
    CHECK(pass::plain_path("/") == "/");
    CHECK(pass::joined_path(".", "x") == "x");
    CHECK(pass::joined_path("/", "x") == "/x");
}

TEST_CASE("SHA-256 of text and of a file") {
    CHECK(pass::sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    const auto path = std::filesystem::temp_directory_path() / "pass-sha256-test";
    std::ofstream(path, std::ios::binary) << std::string(3000000, 'a');
    CHECK(pass::sha256_of_file(path) == pass::sha256(std::string(3000000, 'a')));
    std::filesystem::remove(path);
    CHECK_THROWS_AS(pass::sha256_of_file(path), pass::Error);
}

TEST_CASE("text that is not UTF-8 is refused, with the place") {
    const auto path = (std::filesystem::temp_directory_path() / "pass-text-test").string();
    const auto reason = [&](const std::string& bytes) -> std::string {
        std::ofstream(path, std::ios::binary) << bytes;
        try {
            pass::read_text_file(path);
        } catch (const pass::Error& error) {
            return error.what();
        }
        return "";
    };
    const std::string begin = "cannot read " + path + ": 'utf-8' codec can't decode ";
    CHECK(reason("caf\xC3\xA9").empty());
    CHECK(reason("\xC0\x80") == begin + "byte 0xc0 in position 0: invalid start byte");
    CHECK(reason("a\xE2\x82") == begin + "bytes in position 1-2: unexpected end of data");
    CHECK(reason("\xED\xA0\x80") == begin + "byte 0xed in position 0: invalid continuation byte");
    std::filesystem::remove(path);
    CHECK_FALSE(pass::read_text_file(path));
}

TEST_CASE("the plans of a bundle, in the order of manifests") {
    std::string names;
    for (const pass::Plan& plan : pass::bundle_plans(2)) names += plan.name + " ";
    CHECK(names == "ar draft-1 verify-1 fused-1 draft-2 verify-2 fused-2 ");
}

TEST_CASE("fused tails are symbolic, others are not") {
    using Shape = std::vector<pass::Dimension>;
    CHECK(pass::tail_tensors(pass::fused_plan({2, 2, 2}), 320, 64).at("logits").shape == Shape{"batch", "width", 320});
    CHECK(pass::tail_tensors(pass::verify_plan(3), 320, 64).at("next_ids").shape == Shape{"batch", 4});
    CHECK(pass::logprobs_tensors(5).at("top_ids").shape == Shape{"batch", "max_emitted", 5});
}
