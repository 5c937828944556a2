// For tests/cpp: answers each line of JSON with one: the ids of a string, or what a reader returns
// for an object with "ids" and "stop".

#include <iostream>
#include <nlohmann/json.hpp>
#include <pass/text.hpp>

#include "text/text_reader.h"

namespace {

nlohmann::json answer(const pass::Tokenizer& tokenizer, const nlohmann::json& question) {
    if (question.is_string()) return tokenizer.encode(question.get<std::string>());
    const auto ids = question.at("ids").get<std::vector<std::int64_t>>();
    const auto reader = tokenizer.reader(question.at("stop").get<std::vector<std::string>>(),
                                         question.value("prompt", std::vector<std::int64_t>{}),
                                         question.value("min_tokens", std::int64_t{0}));
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
            std::cout << answer(tokenizer, nlohmann::json::parse(line)).dump(-1, ' ', true) << '\n';
    } catch (const pass::Error& error) {
        std::cerr << "error: " << error.what() << '\n';
        return 2;
    }
}
