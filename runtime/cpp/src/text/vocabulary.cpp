#include "text/vocabulary.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "errors.h"
#include "utf8.h"

namespace pass {

namespace {

using Json = nlohmann::json;

// GPT-2's way of writing bytes as characters: printable bytes stand for themselves, the others for U+0100 and
// following.
std::map<std::string, char> byte_of_character() {
    const auto utf8 = [](unsigned code) {
        if (code < 0x80) return std::string(1, static_cast<char>(code));
        return std::string{static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
    };
    std::map<std::string, char> table;
    unsigned next = 0x100;
    for (unsigned byte = 0; byte < 0x100; ++byte) {
        const bool itself = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
        table[utf8(itself ? byte : next++)] = static_cast<char>(byte);
    }
    return table;
}

// The bytes of a token's text; a text with characters that are not in `table` stands for itself.
std::string to_bytes(const std::string& text, const std::map<std::string, char>& table) {
    std::string bytes;
    for (std::size_t i = 0; i < text.size();) {
        const std::size_t size = utf8_character(text, i).size;
        const auto found = table.find(text.substr(i, size));
        if (found == table.end()) return text;
        bytes += found->second;
        i += size;
    }
    return bytes;
}

[[noreturn]] void unknown(const std::string& what) {
    throw Error("has " + what + ", which only the Python runtime turns into text; use token ids");
}

std::string type_of(const Json& part) { return part.is_object() ? part.value("type", "no type") : "none"; }

// The ids that a template for a single text puts before and after it.
void read_template(const Json& processor, std::vector<std::int64_t>& prefix, std::vector<std::int64_t>& suffix) {
    std::vector<std::int64_t>* side = &prefix;
    for (const Json& part : processor.at("single")) {
        if (part.contains("Sequence")) {
            side = &suffix;
            continue;
        }
        const auto name = part.at("SpecialToken").at("id").get<std::string>();
        for (const Json& id : processor.at("special_tokens").at(name).at("ids"))
            side->push_back(id.get<std::int64_t>());
    }
}

// The pre-tokenizer Digits, where the sequence of pre-tokenizers begins with it, else null. Digits are split here
// because the encoder's library does not: it treats whitespace before a digit like whitespace before a letter.
Json digits_step(const Json& pre_tokenizer) {
    if (type_of(pre_tokenizer) != "Sequence") return {};
    const Json& first = pre_tokenizer.at("pretokenizers").at(0);
    return type_of(first) == "Digits" ? first : Json();
}

}  // namespace

Vocabulary::Vocabulary(const std::string& text) {
    try {
        const Json document = Json::parse(text);
        const Json none, &model = document.at("model");
        if (type_of(model) != "BPE") unknown("a model of type " + type_of(model));
        const std::string decoder = type_of(document.value("decoder", none));
        if (decoder != "ByteLevel") unknown("a decoder of type " + decoder);
        const auto table = byte_of_character();
        for (const auto& [token, id] : model.at("vocab").items())
            bytes_[id.get<std::int64_t>()] = to_bytes(token, table);
        for (const Json& added : document.value("added_tokens", Json::array())) {
            const auto id = added.at("id").get<std::int64_t>();
            const auto content = added.at("content").get<std::string>();
            bytes_[id] = added.at("special").get<bool>() ? "" : to_bytes(content, table);
            if (added.at("special").get<bool>()) special_[id] = content;
            if (content.empty()) continue;
            added_.emplace_back(content, id);
            const auto strips = {"single_word", "lstrip", "rstrip"};
            if (std::any_of(strips.begin(), strips.end(), [&](auto* flag) { return added.value(flag, false); })) {
                unknown("an added token that takes in what is beside it");
            }
        }
        std::stable_sort(added_.begin(), added_.end(),
                         [](const auto& a, const auto& b) { return a.first.size() > b.first.size(); });
        if (const Json digits = digits_step(document.value("pre_tokenizer", none)); !digits.is_null()) {
            digits_ = digits.value("individual_digits", false) ? Digits::one_by_one : Digits::in_runs;
        }
        const Json processor = document.value("post_processor", none);
        const std::string kind = type_of(processor);
        if (kind == "TemplateProcessing") {
            read_template(processor, prefix_, suffix_);
        } else if (kind != "ByteLevel" && kind != "none") {
            unknown("a post-processor of type " + kind);
        }
    } catch (const Json::exception& error) {
        throw Error(std::string("is no tokenizer that this runtime reads: ") + error.what());
    }
}

const std::string& Vocabulary::bytes(std::int64_t token) const {
    static const std::string nothing;
    const auto found = bytes_.find(token);
    return found == bytes_.end() ? nothing : found->second;
}

std::vector<Vocabulary::Part> Vocabulary::split(const std::string& text) const {
    std::vector<Part> parts;
    const auto between = [&](const std::string& piece) {
        if (piece.empty()) return;
        if (digits_ == Digits::as_letters) return parts.push_back({piece, -1});
        for (std::string& part : split_digits(piece, digits_ == Digits::one_by_one))
            parts.push_back({std::move(part), -1});
    };
    std::size_t begin = 0;
    for (std::size_t i = 0; i < text.size();) {
        const auto found = std::find_if(added_.begin(), added_.end(), [&](const auto& added) {
            return text.compare(i, added.first.size(), added.first) == 0;
        });
        if (found == added_.end()) {
            ++i;
            continue;
        }
        between(text.substr(begin, i - begin));
        parts.push_back({found->first, found->second});
        begin = i += found->first.size();
    }
    between(text.substr(begin));
    return parts;
}

std::int64_t Vocabulary::special(const std::string& text) const {
    for (const auto& [id, content] : special_) {
        if (content == text) return id;
    }
    return -1;
}

const std::string& Vocabulary::special_text(std::int64_t token) const {
    static const std::string nothing;
    const auto found = special_.find(token);
    return found == special_.end() ? nothing : found->second;
}

}  // namespace pass
