// The manifest's parts: reading, contradictions, hashes. tests/cpp compares what is refused with Python.

#include "bundle/manifest.h"

#include <filesystem>
#include <fstream>

#include "bundle/hashes.h"
#include "bundle/tensors.h"
#include "catch.hpp"
#include "errors.h"
#include "utf8.h"

namespace {

std::string complaint(const std::string& text) {
    try {
        pass::parse_manifest(text);
    } catch (const pass::Error& error) {
        return error.what();
    }
    return "";
}

// The complaint about a manifest that ends after its vocabulary.
std::string complaint_of_vocabulary(const std::string& size) {
    return complaint(R"({"format": "pass-bundle", "version": 3, "model": {"name": "", "source": "", "family": "",)"
                     R"( "dtype": "float32", "weights": "full", "vocab_size": )" +
                     size + "}}");
}

}  // namespace

TEST_CASE("what is not JSON, and what is no manifest") {
    CHECK_THAT(complaint(""), Catch::Matchers::StartsWith("file: Invalid JSON: "));
    CHECK_THAT(complaint("\xEF\xBB\xBF{}"), Catch::Matchers::StartsWith("file: Invalid JSON: "));
    CHECK(complaint(std::string(100000, '[')) == "file: Invalid JSON: recursion limit exceeded");
    CHECK(complaint("[]") == "file: must be an object");
    CHECK(complaint("{}") == "format: is missing");
    CHECK(complaint(R"({"format": "pass-bundle", "version": 4, "news": 1})") ==
          "manifest version 4 is not 3 (export again with this version)");
}

TEST_CASE("numbers are integers in their range") {
    CHECK(complaint_of_vocabulary("8") == "model.hidden_size: is missing");
    const std::string whole = "model.vocab_size: must be a whole number of at most 2^53";
    for (const char* size : {"8.0", "true", "null", "\"8\"", "9223372036854775808", "-9223372036854775808"}) {
        CHECK(complaint_of_vocabulary(size) == whole);
    }
    CHECK(complaint_of_vocabulary("0") == "model.vocab_size: must be at least 1");
}

TEST_CASE("names that leave the bundle are refused") {
    CHECK(pass::is_file_name("trunk.onnx.data"));
    for (const char* name : {"", "..", "../x", "/etc", "a/b", ".hidden", "a b", "a\n"}) {
        CHECK_FALSE(pass::is_file_name(name));
    }
    CHECK_FALSE(pass::is_file_name(std::string("a\0", 2)));
    CHECK_FALSE(pass::is_file_name(std::string(101, 'x')));
}

TEST_CASE("messages are one line") { CHECK(pass::one_line("\tit's  a\r\n line\x7f ") == "it's a line"); }

TEST_CASE("SHA-256 of text and of a file") {
    CHECK(pass::sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    const auto path = std::filesystem::temp_directory_path() / "pass-sha256-test";
    std::ofstream(path, std::ios::binary) << std::string(3000000, 'a');
    CHECK(pass::sha256_of_file(path) == pass::sha256(std::string(3000000, 'a')));
    std::filesystem::remove(path);
    CHECK_THROWS_AS(pass::sha256_of_file(path), pass::Error);
}

TEST_CASE("text that is not UTF-8 is refused") {
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
    CHECK(reason("caf\xC3\xA9").empty());
    for (const char* bytes : {"\xC0\x80", "a\xE2\x82", "\xED\xA0\x80", "\xFF"}) {
        CHECK(reason(bytes) == "cannot read " + path + ": it is not UTF-8");
    }
    std::filesystem::remove(path);
    CHECK_FALSE(pass::read_text_file(path));
}

TEST_CASE("the plans of a bundle, in the order of manifests") {
    std::string names;
    for (const pass::Plan& plan : pass::bundle_plans(2, true)) names += plan.name + " ";
    CHECK(names == "ar draft-1 verify-1 fused-1 draft-2 verify-2 fused-2 tree-3 ");
    CHECK(pass::bundle_plans(2, false).size() == 7);
}

TEST_CASE("outputs feed inputs") {
    CHECK(pass::fed_by("next_ids") == "input_ids");
    CHECK(pass::fed_by("next_draft_probs") == "draft_probs");
    CHECK(pass::fed_by("present_key.0") == "past_key.0");
    CHECK_FALSE(pass::fed_by("logits"));
}

TEST_CASE("a draft head that no file could hold is no overflow") {
    pass::ModelInfo model;
    model.vocab_size = model.hidden_size = std::int64_t{1} << 53;
    const std::int64_t large = std::int64_t{1} << 53;
    CHECK(pass::head_arrays(model, {large, large, 64}).back().bytes > large);
    model.vocab_size = 10;
    CHECK(pass::head_arrays(model, {3, 4, 64})[1].offset == 64);
}

TEST_CASE("fused tails are symbolic, others are not") {
    using Shape = std::vector<pass::Dimension>;
    CHECK(pass::tail_tensors(pass::fused_plan({2, 2, 2}), 320, 64).at("logits").shape == Shape{"batch", "width", 320});
    CHECK(pass::tail_tensors(pass::verify_plan(3), 320, 64).at("next_ids").shape == Shape{"batch", 4});
    CHECK(pass::logprobs_tensors(5).at("top_ids").shape == Shape{"batch", "max_emitted", 5});
}
