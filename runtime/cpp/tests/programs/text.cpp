// For tests/cpp: text BUNDLE reads lines of JSON. For a text it writes the ids; for an object with
// "ids", "stop" and perhaps "prompt" and "min_tokens", the pieces and rest of the text, and the
// stop string.

#include <iostream>
#include <nlohmann/json.hpp>
#include <pass/text.hpp>

#include "text/text_reader.h"

namespace {

nlohmann::json read(const pass::Tokenizer& tokenizer, const nlohmann::json& sent) {
    if (sent.is_string()) return tokenizer.encode(sent.get<std::string>());
    const auto ids = sent.at("ids").get<std::vector<std::int64_t>>();
    const auto reader = tokenizer.reader(sent.at("stop").get<std::vector<std::string>>(),
                                         sent.value("prompt", std::vector<std::int64_t>{}),
                                         sent.value("min_tokens", std::int64_t{0}));
    std::vector<std::string> pieces;
    std::optional<std::string> stop;
    for (std::size_t i = 0; i < ids.size() && !stop; ++i)
        pieces.push_back(reader->read(ids[i], stop));
    nlohmann::json result{
        {"pieces", pieces}, {"rest", reader->flush()}, {"text", tokenizer.decode(ids)}};
    if (stop) result["stop"] = *stop;
    return result;
}

}  // namespace

int main(int, char** arguments) {
    try {
        const pass::Tokenizer tokenizer(arguments[1]);
        for (std::string line; std::getline(std::cin, line);)
            std::cout << read(tokenizer, nlohmann::json::parse(line)).dump(-1, ' ', true) << '\n';
    } catch (const pass::Error& error) {
        std::cerr << "error: " << error.what() << '\n';
        return 2;
    }
}
