#include "bundle/manifest.h"

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "bundle/bindings.h"
#include "bundle/integrity.h"
#include "catch.hpp"
#include "errors.h"
#include "utf8.h"

namespace {

using Json = nlohmann::json;

std::string error_of(const std::string& text) {
    try {
        pass::parse_manifest(text, "m");
    } catch (const pass::Error& error) {
        return error.what();
    }
    return "";
}

Json whole_manifest() {
    const Json graph{{"file", "a.onnx"},
                     {"inputs", Json::array()},
                     {"outputs", {{{"name", "x"}, {"dtype", "int64"}, {"shape", {"batch", 2}}}}}};
    const Json profile{{"sizes", {{"batch", {1, 1, 4}}}}};
    const Json engine{{"graph", "a.onnx"}, {"file", "a.engine"},    {"sha256", ""},
                      {"bytes", 1},        {"profiles", {profile}}, {"aliases", {{"y", "x"}}}};
    return {{"format", "pass-bundle"},
            {"version", pass::manifest_version},
            {"model",
             {{"name", "Gr\u00f6\u00dfe"},
              {"dtype", "float32"},
              {"weights", "int8"},
              {"vocab_size", 8},
              {"hidden_size", 4},
              {"heads", 1},
              {"kv_heads", 1},
              {"head_dim", 4},
              {"max_capacity", 64},
              {"bos_token_id", nullptr},
              {"eos_token_ids", {7}}}},
            {"lookahead",
             {{"length", 1},
              {"source", ""},
              {"acceptance_per_position", {0.5}},
              {"acceptance_per_position_sampled", Json::array()}}},
            {"rule", "match"},
            {"trunk", graph},
            {"derived", {{{"file", "b.onnx"}, {"device", "cpu"}}}},
            {"windows", {{{"name", "ar"}, {"tails", {{"greedy", graph}}}}}},
            {"logprobs", graph},
            {"processors", graph},
            {"noise", {{"scheme", "block-race-1"}, {"members", 8}, {"row", 16}, {"bits", 30}}},
            {"files", {{"a.onnx", {{"sha256", ""}, {"bytes", 1}}}}},
            {"engines",
             {{{"directory", "trt"},
               {"library", "tensorrt"},
               {"version", "11.0"},
               {"targets", {"sm90"}},
               {"bundle", ""},
               {"lookahead", 1},
               {"max_batch_size", 1},
               {"capacities", {256}},
               {"prefill_widths", {64}},
               {"engines", {engine}}}}}};
}

std::string digested(Json document) {
    Json content = document;
    content.erase("engines");
    document["digest"] = pass::sha256(content.dump());
    return document.dump();
}

// Calls `change` with `value` and each value in it, and puts it back.
void for_each_value(Json& value, const std::function<void(Json& value)>& change) {
    const Json original = value;
    change(value);
    value = original;
    if (!value.is_structured()) return;
    for (Json& item : value) for_each_value(item, change);
}

}  // namespace

TEST_CASE("a manifest is read") {
    const pass::Manifest manifest = pass::parse_manifest(digested(whole_manifest()), "m");
    CHECK(manifest.model.vocab_size == 8);
    CHECK(manifest.windows.at("ar").at("greedy").outputs[0].shape[1] == pass::Dimension(2));
    CHECK(manifest.engines[0].engines[0].profiles[0].admits({{"batch", 4}}));
    CHECK(manifest.derived_trunk("cpu", 1)->file == "b.onnx");
}

TEST_CASE("an edited manifest is refused, but engines may change") {
    Json document = Json::parse(digested(whole_manifest()));
    document["engines"] = Json::array();
    CHECK(error_of(document.dump()).empty());
    document["model"]["eos_token_ids"] = {6};
    CHECK(error_of(document.dump()) ==
          "m was edited after the export (its digest differs): export the bundle again");
    document.erase("digest");
    CHECK_THAT(error_of(document.dump()), Catch::Contains("was edited after the export"));
}

// The digest of this text is that of Python.
TEST_CASE("the digest is that of the canonical text") {
    const Json content = Json::parse(
        R"({"format": "pass-bundle", "version": 5, "model": {"name": "Gr\u00f6\u00dfe \u2028 \"x\"\t\u0001\u007f/\ud83d\ude00",
        "heads": 9}, "lookahead": {"acceptance_per_position": [0.5, 1.0, 1e-05, 0.123457, 0.0]}, "windows": [],
        "derived": [], "processors": null})");
    CHECK(pass::sha256(content.dump()) ==
          "33d19fb53d40c8f7026406ab32b32bd85e91ba67c2e04f1f13bdc81f3ace03ee");
}

TEST_CASE("a hostile manifest crashes nothing") {
    Json document = whole_manifest();
    int refused = 0;
    const auto replace = [&](Json& value) {
        for (const char* text : {"null", "-1", "0", "1e300", "9007199254740993", "\"../x\"", "[]",
                                 "{}", "[[]]", "18446744073709551615", "true"}) {
            value = Json::parse(text);
            const std::string error = error_of(digested(document));
            CHECK(error.find('\n') == std::string::npos);
            refused += error.empty() ? 0 : 1;
        }
    };
    for (Json& value : document) for_each_value(value, replace);
    CHECK(refused > 500);
    document = whole_manifest();
    document["model"]["eos_token_ids"] = {8};  // of 8 tokens
    CHECK(error_of(digested(document)) ==
          "m: 8 is not a whole number from 0 to 7; export the bundle again");
    document = whole_manifest();
    document["files"]["../secret"] = {{"sha256", ""}, {"bytes", 1}};
    CHECK_THAT(error_of(digested(document)), Catch::Contains("could point outside the bundle"));
    document = whole_manifest();
    document["engines"][0]["capacities"] = Json::array();
    CHECK_THAT(error_of(digested(document)), Catch::Contains("an engine set has no capacities"));
}

TEST_CASE("what is no JSON or no manifest is refused") {
    CHECK_THAT(error_of(""), Catch::Matchers::StartsWith("m: file: Invalid JSON: "));
    CHECK_THAT(error_of("\xEF\xBB\xBF{}"), Catch::Matchers::StartsWith("m: file: Invalid JSON: "));
    CHECK(error_of(std::string(100000, '[')) == "m: file: Invalid JSON: recursion limit exceeded");
    CHECK(error_of("[]") == "m: it is not the manifest of a bundle");
    CHECK(error_of(R"({"format": "pass-bundle", "version": 4, "news": 1})") ==
          "m: manifest version 4 is not 5; export the bundle again");
}

TEST_CASE("a profile admits sizes that are in all of its ranges") {
    const pass::Profile profile{{{"batch", {1, 2}}, {"width", {4, 8}}}};
    CHECK(profile.admits({{"batch", 2}, {"width", 4}, {"columns", 512}}));
    CHECK_FALSE(profile.admits({{"batch", 3}, {"width", 4}}));
    CHECK_FALSE(profile.admits({{"batch", 1}}));  // a size is missing
}

TEST_CASE("one_line removes line breaks and control characters") {
    CHECK(pass::one_line("\tit's  a\r\n line\x7f ") == "it's a line");
}

TEST_CASE("SHA-256 of text and of a file") {
    CHECK(pass::sha256("abc") ==
          "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    const auto path = std::filesystem::temp_directory_path() / "pass-sha256-test";
    std::ofstream(path, std::ios::binary) << std::string(3000000, 'a');
    CHECK(pass::sha256_of_file(path) == pass::sha256(std::string(3000000, 'a')));
    std::filesystem::remove(path);
    CHECK_THROWS_AS(pass::sha256_of_file(path), pass::Error);
}

TEST_CASE("a bundle whose files were replaced while it was opened is refused") {
    namespace fs = std::filesystem;
    const fs::path bundle = fs::temp_directory_path() / "pass-replaced-test";
    fs::create_directory(bundle);
    for (const char* name : {"pass_config.json", "a.data"}) std::ofstream(bundle / name);
    pass::Manifest manifest;
    manifest.files["a.data"] = {};
    for (const char* name : {"a.data", "pass_config.json"}) {
        const auto before = pass::identities(bundle);
        std::ofstream(bundle / "other") << "not of the bundle";
        CHECK_NOTHROW(pass::check_unchanged(bundle, manifest, before));
        fs::rename(bundle / name, bundle / "moved");
        CHECK_THROWS_AS(pass::check_unchanged(bundle, manifest, before), pass::Error);
        std::ofstream(bundle / name);
        CHECK_THROWS_AS(pass::check_unchanged(bundle, manifest, before), pass::Error);
    }
    fs::remove_all(bundle);
}

TEST_CASE("a file that is not UTF-8 is refused") {
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
    for (const char* bytes : {"\xC0\x80", "a\xE2\x82", "\xED\xA0\x80", "\xFF"})
        CHECK(reason(bytes) == "cannot read " + path + ": it is not UTF-8");
    std::filesystem::remove(path);
    CHECK_FALSE(pass::read_text_file(path));
}

TEST_CASE("outputs feed the inputs of the next pass") {
    CHECK(pass::fed_input("next_ids") == "input_ids");
    CHECK(pass::fed_input("next_draft_probs") == "draft_probs");
    CHECK(pass::fed_input("present_key.0") == "past_key.0");
    CHECK_FALSE(pass::fed_input("logits"));
}
