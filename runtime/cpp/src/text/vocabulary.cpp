#include "text/vocabulary.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "errors.h"
#include "utf8.h"

namespace pass {

namespace {

using Json = nlohmann::json;

// Printable bytes stand for themselves, the others are U+0100, U+0101, ..., as in GPT-2.
std::map<std::string, char> byte_of_character() {
    const auto utf8 = [](unsigned code) {
        if (code < 0x80) return std::string(1, static_cast<char>(code));
        return std::string{static_cast<char>(0xC0 | code >> 6),
                           static_cast<char>(0x80 | (code & 0x3F))};
    };
    std::map<std::string, char> table;
    unsigned next = 0x100;
    for (unsigned byte = 0; byte < 0x100; ++byte) {
        const bool itself =
            (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
        table[utf8(itself ? byte : next++)] = static_cast<char>(byte);
    }
    return table;
}

// The text itself if it has characters that are not in `table`.
std::string to_bytes(const std::string& text, const std::map<std::string, char>& table) {
    std::string bytes;
    for (std::size_t i = 0; i < text.size();) {
        const std::size_t size = utf8_character(text, i).size;
        const auto byte = table.find(text.substr(i, size));
        if (byte == table.end()) return text;
        bytes += byte->second;
        i += size;
    }
    return bytes;
}

[[noreturn]] void refuse(const std::string& what) {
    throw Error("has " + what + ", which only the Python runtime turns into text; use token ids");
}

std::string type_of(const Json& part) {
    return part.is_object() ? part.value("type", "no type") : "none";
}

void read_template(const Json& processor, std::vector<std::int64_t>& prefix,
                   std::vector<std::int64_t>& suffix) {
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

// The pre-tokenizer Digits, if the sequence of pre-tokenizers begins with it, else null. Digits are
// split here: onnxruntime-genai treats white space before digits as it does before letters.
Json digits_step(const Json& pre_tokenizer) {
    if (type_of(pre_tokenizer) != "Sequence") return {};
    const Json& first = pre_tokenizer.at("pretokenizers").at(0);
    return type_of(first) == "Digits" ? first : Json();
}

struct ByteFallback {
    std::vector<std::pair<std::string, std::string>> replaced;  // texts, and what replaces them
    std::size_t stripped_spaces = 0;

    std::string bytes(std::string text) const {
        if (text.size() == 6 && text.starts_with("<0x") && text.back() == '>' &&
            std::isxdigit(text[3]) != 0 && std::isxdigit(text[4]) != 0) {
            return {static_cast<char>(std::stoi(text.substr(3, 2), nullptr, 16))};
        }
        for (const auto& [from, to] : replaced) {
            for (std::size_t at = text.find(from); at != std::string::npos;
                 at = text.find(from, at + to.size()))
                text.replace(at, from.size(), to);
        }
        return text;
    }
};

// The decoder of Llama 2, Mistral, Gemma and Phi-3: texts are replaced, then ByteFallback, Fuse and
// at most one Strip of spaces at the beginning. None for any other decoder.
std::optional<ByteFallback> read_byte_fallback(const Json& decoder) {
    if (type_of(decoder) != "Sequence") return std::nullopt;
    ByteFallback result;
    std::string order;  // the first letters of the steps' types
    for (const Json& step : decoder.at("decoders")) {
        const std::string type = type_of(step);
        order += type.substr(0, 1);
        if (type == "Replace" && step.at("pattern").contains("String")) {
            result.replaced.emplace_back(step.at("pattern").at("String"), step.at("content"));
            if (result.replaced.back().first.empty()) return std::nullopt;
        } else if (type == "Strip" && step.at("content") == " " && step.at("stop") == 0) {
            result.stripped_spaces = step.at("start").get<std::size_t>();
        } else if (type != "ByteFallback" && type != "Fuse") {
            return std::nullopt;
        }
    }
    const std::string after_replacements =
        order.substr(std::min(order.find_first_not_of('R'), order.size()));
    return after_replacements == "BF" || after_replacements == "BFS" ? std::optional(result)
                                                                     : std::nullopt;
}

}  // namespace

Vocabulary::Vocabulary(const std::string& text) {
    try {
        const Json document = Json::parse(text);
        const Json none, &model = document.at("model");
        if (type_of(model) != "BPE") refuse("a model of type " + type_of(model));
        const Json decoder = document.value("decoder", none);
        const auto fallback = read_byte_fallback(decoder);
        if (!fallback && type_of(decoder) != "ByteLevel")
            refuse("a decoder of type " + type_of(decoder));
        byte_fallback_ = fallback.has_value();
        if (fallback) stripped_spaces_ = fallback->stripped_spaces;
        const auto table = byte_of_character();
        const auto bytes_of = [&](const std::string& token) {
            return fallback ? fallback->bytes(token) : to_bytes(token, table);
        };
        for (const auto& [token, id] : model.at("vocab").items())
            bytes_[id.get<std::int64_t>()] = bytes_of(token);
        for (const Json& added : document.value("added_tokens", Json::array())) {
            const auto id = added.at("id").get<std::int64_t>();
            const auto content = added.at("content").get<std::string>();
            bytes_[id] = added.at("special").get<bool>() ? "" : bytes_of(content);
            if (added.at("special").get<bool>()) special_[content] = id;
            if (content.empty() || fallback) continue;
            added_.emplace_back(content, id);
            for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
                if (added.value(flag, false)) refuse(std::string("an added token with ") + flag);
            }
        }
        if (fallback) return;  // the rest is for encoding text
        std::stable_sort(added_.begin(), added_.end(), [](const auto& a, const auto& b) {
            return a.first.size() > b.first.size();
        });
        if (const Json digits = digits_step(document.value("pre_tokenizer", none));
            !digits.is_null()) {
            digits_ =
                digits.value("individual_digits", false) ? Digits::one_by_one : Digits::in_runs;
        }
        const Json processor = document.value("post_processor", none);
        const std::string kind = type_of(processor);
        if (kind == "TemplateProcessing") {
            read_template(processor, prefix_, suffix_);
        } else if (kind != "ByteLevel" && kind != "none") {
            refuse("a post-processor of type " + kind);
        }
    } catch (const Json::exception& error) {
        throw Error(std::string("is no tokenizer that this runtime reads: ") + error.what());
    }
}

const std::string& Vocabulary::bytes(std::int64_t token) const {
    static const std::string nothing;
    const auto entry = bytes_.find(token);
    return entry == bytes_.end() ? nothing : entry->second;
}

std::vector<Vocabulary::Part> Vocabulary::split(const std::string& text) const {
    std::vector<Part> parts;
    const auto add_text = [&](const std::string& piece) {
        if (piece.empty()) return;
        if (digits_ == Digits::as_letters) return parts.push_back({piece, -1});
        for (std::string& part : split_digits(piece, digits_ == Digits::one_by_one))
            parts.push_back({std::move(part), -1});
    };
    std::size_t begin = 0;
    for (std::size_t i = 0; i < text.size();) {
        const auto added = std::find_if(added_.begin(), added_.end(), [&](const auto& each) {
            return text.compare(i, each.first.size(), each.first) == 0;
        });
        if (added == added_.end()) {
            ++i;
            continue;
        }
        add_text(text.substr(begin, i - begin));
        parts.push_back({added->first, added->second});
        begin = i += added->first.size();
    }
    add_text(text.substr(begin));
    return parts;
}

std::int64_t Vocabulary::special(const std::string& text) const {
    const auto entry = special_.find(text);
    return entry == special_.end() ? -1 : entry->second;
}

}  // namespace pass
