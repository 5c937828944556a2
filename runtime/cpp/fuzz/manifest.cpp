// Fuzzes the reader of manifests: any bytes must be a manifest, or be refused with an Error.
//
// With clang this is a libFuzzer target. Other compilers build a program that itself mutates the
// files that it is given: manifest_fuzz SECONDS FILE...

#include <cstdint>
#include <cstdlib>
#include <string>

#include "bundle/manifest.h"
#include "errors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    try {
        const pass::Manifest manifest =
            pass::parse_manifest(std::string(reinterpret_cast<const char*>(data), size));
        pass::check_consistency(manifest);
        if (manifest.content_hash().size() != 64) std::abort();  // no SHA-256 in hexadecimal
    } catch (const pass::Error& error) {
        if (*error.what() == '\0') std::abort();
    }
    return 0;
}

#ifndef PASS_LIBFUZZER

#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <vector>

namespace {

const std::vector<std::string> json_words{"null", "-1", "0",  "1e999",      "9223372036854775807",
                                          "\"\"", "[]", "{}", "true",       ",",
                                          ":",    "\"", "\\", "\xff",       "3",
                                          "320",  "[[", "}}", "\"\\ud800\""};

// `text` with a few bytes changed, cut out, doubled, or replaced by a word of JSON.
std::string mutated(std::string text, std::mt19937& random) {
    const auto below = [&](std::size_t limit) {
        return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random);
    };
    for (std::size_t changes = 1 + below(4); changes > 0 && !text.empty(); --changes) {
        const std::size_t at = below(text.size());
        const std::size_t length = 1 + below(1 + below(64));  // mostly short
        switch (below(5)) {
            case 0: text[at] = static_cast<char>(below(256)); break;
            case 1: text.erase(at, length); break;
            case 2: text.insert(at, text.substr(below(text.size()), length)); break;
            case 3: text.insert(at, json_words[below(json_words.size())]); break;
            default: text.replace(at, 1 + below(4), json_words[below(json_words.size())]); break;
        }
    }
    return text;
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 3) {
        std::cerr << "usage: manifest_fuzz SECONDS FILE...\n";
        return 2;
    }
    std::vector<std::string> corpus;
    for (int i = 2; i < count; ++i) {
        std::ifstream file(arguments[i], std::ios::binary);
        corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    std::mt19937 random(1);
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(arguments[1]));
    std::size_t runs = 0;
    for (; std::chrono::steady_clock::now() < end; ++runs) {
        const std::string text = mutated(corpus[runs % corpus.size()], random);
        LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
    }
    std::cout << runs << " manifests, no crash\n";
}

#endif
