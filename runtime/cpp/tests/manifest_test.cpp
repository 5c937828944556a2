// Manifests are read, and refused if they are wrong or contradict themselves; files are hashed.
// tests/cpp compares what is refused with Python.

#include "bundle/manifest.h"

#include <filesystem>
#include <fstream>
#include <functional>

#include "bundle/integrity.h"
#include "bundle/tensors.h"
#include "catch.hpp"
#include "errors.h"
#include "utf8.h"

namespace {

// The error of parsing `text`; "" if there is none.
std::string error_of(const std::string& text) {
    try {
        pass::parse_manifest(text);
    } catch (const pass::Error& error) {
        return error.what();
    }
    return "";
}

// The error of parsing a manifest that has this vocab_size and no later field.
std::string error_of_vocab_size(const std::string& size) {
    return error_of(
        R"({"format": "pass-bundle", "version": 4, "model": {"name": "", "source": "", "family": "",)"
        R"( "dtype": "float32", "weights": "full", "vocab_size": )" +
        size + "}}");
}

// A whole manifest. engines: its engine sets.
std::string whole_manifest(const std::string& engines) {
    return R"({"format": "pass-bundle", "version": 4, "model": {"name": "", "source": "", "family": "",
        "dtype": "float32", "weights": "int8", "vocab_size": 8, "hidden_size": 4, "layers": 1, "heads": 1,
        "kv_heads": 1, "head_dim": 4, "max_capacity": 64, "bos_token_id": null, "eos_token_ids": []},
        "lookahead": {"length": 1, "trained": false, "source": "", "adapter_rank": 0,
        "acceptance_per_position": [], "head": null}, "rule": "match",
        "trunk": {"file": "trunk.onnx", "inputs": [], "outputs": []},
        "derived": [{"file": "trunk.cpu.onnx", "device": "cpu"}], "plans": [], "logprobs": {"file": "logprobs.onnx", "inputs": [], "outputs": []},
        "feeds": {}, "noise": {"scheme": "block-race-1", "members": 8, "row": 16, "bits": 30}, "files": {},
        "tools": {}, "engines": [)" +
           engines + "]}";
}

}  // namespace

TEST_CASE("chunk widths and capacities of engines must be positive") {
    const auto refusal = [](const std::string& capacities, const std::string& widths) {
        return error_of(whole_manifest(
            R"({"directory": "trt", "library": "tensorrt", "version": "11.0", "targets": [], "bundle": "",
            "lookahead": 1, "max_batch_size": 1, "capacities": )" +
            capacities + R"(, "prefill_widths": )" + widths + R"(, "engines": []})"));
    };
    CHECK(refusal("[256]", "[64, 16]").empty());
    CHECK(refusal("[256]", "[64, -16]") == "engines.0.prefill_widths.1: must be at least 1");
    CHECK(refusal("[256]", "[0]") == "engines.0.prefill_widths.0: must be at least 1");
    CHECK(refusal("[-256]", "[64]") == "engines.0.capacities.0: must be at least 1");
    CHECK(refusal("[]", "[64]") == "engines.0.capacities: must not be empty");
}

TEST_CASE("a profile admits sizes that are in all of its ranges") {
    const pass::Profile profile{{{"batch", {1, 2}}, {"width", {4, 8}}}};
    CHECK(profile.admits({{"batch", 2}, {"width", 4}, {"columns", 512}}));
    CHECK_FALSE(profile.admits({{"batch", 3}, {"width", 4}}));
    CHECK_FALSE(profile.admits({{"batch", 1}}));  // a size is missing
}

TEST_CASE("what is no JSON or no manifest is refused") {
    CHECK_THAT(error_of(""), Catch::Matchers::StartsWith("file: Invalid JSON: "));
    CHECK_THAT(error_of("\xEF\xBB\xBF{}"), Catch::Matchers::StartsWith("file: Invalid JSON: "));
    CHECK(error_of(std::string(100000, '[')) == "file: Invalid JSON: recursion limit exceeded");
    CHECK(error_of("[]") == "file: must be an object");
    CHECK(error_of("{}") == "format: is missing");
    CHECK(error_of(R"({"format": "pass-bundle", "version": 3, "news": 1})") ==
          "manifest version 3 is not 4 (export again with this version)");
}

TEST_CASE("numbers are integers in their range") {
    CHECK(error_of_vocab_size("8") == "model.hidden_size: is missing");
    const std::string not_whole = "model.vocab_size: must be a whole number of at most 2^53";
    for (const char* size :
         {"8.0", "true", "null", "\"8\"", "9223372036854775808", "-9223372036854775808"}) {
        CHECK(error_of_vocab_size(size) == not_whole);
    }
    CHECK(error_of_vocab_size("0") == "model.vocab_size: must be at least 1");
}

TEST_CASE("file names that could point outside the bundle are refused") {
    CHECK(pass::is_file_name("trunk.onnx.data"));
    for (const char* name : {"", "..", "../x", "/etc", "a/b", ".hidden", "a b", "a\n"})
        CHECK_FALSE(pass::is_file_name(name));
    CHECK_FALSE(pass::is_file_name(std::string("a\0", 2)));
    CHECK_FALSE(pass::is_file_name(std::string(101, 'x')));
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
    manifest.files.emplace_back("a.data", pass::FileInfo{});
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

namespace {

using pass::Dimension, pass::Manifest, pass::Tensor;

// A manifest of one layer, with the fields that `check_consistency` reads.
Manifest one_layer() {
    Manifest manifest;
    manifest.model.dtype = "float16";
    manifest.model.vocab_size = 10;
    manifest.model.layers = 1;
    manifest.model.kv_heads = 2;
    manifest.model.head_dim = 4;
    manifest.model.eos_token_ids = {9};
    const std::vector<Dimension> cache{"batch", 2, "capacity", 4};
    manifest.trunk.file = "trunk.onnx";
    for (const char* name : {"past_key.0", "past_value.0"})
        manifest.trunk.inputs.push_back({name, "float16", cache});
    manifest.trunk.inputs.push_back({"input_ids", "int64", {"batch", "width"}});
    for (const char* name : {"present_key.0", "present_value.0"})
        manifest.trunk.outputs.push_back({name, "float16", cache});
    manifest.trunk.outputs.push_back({"logits", "float32", {"batch", "logit_rows", 10}});
    pass::PlanInfo tree{"tree-3", {0, 1, 0}, {}};
    tree.tails.emplace_back("greedy",
                            pass::Graph{"tail.onnx", {{"length", "int64", {"batch"}}}, {}});
    manifest.plans.push_back(std::move(tree));
    return manifest;
}

// The error of `check_consistency` for `one_layer` with a change; "" if there is none.
std::string contradiction(const std::function<void(Manifest&)>& change) {
    Manifest manifest = one_layer();
    change(manifest);
    try {
        pass::check_consistency(manifest);
    } catch (const pass::Error& error) {
        return error.what();
    }
    return "";
}

}  // namespace

TEST_CASE("manifests that could crash or mislead this runtime are refused") {
    CHECK(contradiction([](Manifest&) {}) == "");
    CHECK(contradiction([](Manifest& m) { m.model.eos_token_ids = {10}; }) ==
          "token 10 is not in the vocabulary of 10 (model.vocab_size)");
    CHECK(contradiction([](Manifest& m) { m.model.bos_token_id = -1; }) ==
          "token -1 is not in the vocabulary of 10 (model.vocab_size)");
    CHECK(contradiction([](Manifest& m) { m.model.head_dim = 8; }) ==
          "past_key.0 is float16 [batch,2,capacity,4], not float16 [batch,2,capacity,8] "
          "(model.kv_heads, model.head_dim)");
    CHECK(contradiction([](Manifest& m) { m.model.dtype = "float32"; }) ==
          "past_key.0 is float16 [batch,2,capacity,4], not float32 [batch,2,capacity,4] "
          "(model.kv_heads, model.head_dim)");
    CHECK(contradiction([](Manifest& m) { m.trunk.outputs.erase(m.trunk.outputs.begin()); }) ==
          "model.layers is 1 and the trunk has 1 present tensors");
    CHECK(contradiction([](Manifest& m) { m.trunk.outputs.pop_back(); }) ==
          "the trunk's logits are not those of model.vocab_size 10");
    CHECK(contradiction([](Manifest& m) { m.trunk.outputs.back().shape.back() = 11; }) ==
          "the trunk's logits are not those of model.vocab_size 10");
    CHECK(contradiction([](Manifest& m) { m.trunk.inputs.back().dtype = "int32"; }) ==
          "input_ids of trunk.onnx cannot be int32 [batch,width]");
    CHECK(contradiction([](Manifest& m) { m.trunk.inputs.back().name = "novelty"; }) ==
          "novelty of trunk.onnx cannot be int64 [batch,width]");
    CHECK(contradiction([](Manifest& m) { m.plans[0].tails[0].second.inputs[0].shape = {}; }) ==
          "length of tail.onnx cannot be int64 []");
    CHECK(contradiction([](Manifest& m) {
              m.plans[0].parents = {0, 2, 0};
          }) == "draft 2 of the tree of tree-3 follows no row before it");
    CHECK(contradiction([](Manifest& m) {
              pass::EngineSet& engines = m.engines.emplace_back();
              engines.directory = "trt";
              engines.capacities = {128, 256};
              engines.prefill_widths = {512, 64};
          }) == "engines trt have prompt chunks of 512 tokens and a KV capacity of 256");
    CHECK(contradiction([](Manifest& m) {
              m.processors = pass::Graph{"p", {{"allowed", "bool", {1, 1, 2}}}, {}};
          }) == "allowed of p cannot be bool [1,1,2]");
}
