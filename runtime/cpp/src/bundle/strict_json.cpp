#include "bundle/strict_json.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <stdexcept>

namespace pass::strict {

namespace {

constexpr int deepest = 200;  // nested lists and objects, as in Python
constexpr std::int64_t largest = std::int64_t{1}
                                 << 53;  // numbers are at most this, so that sums of them cannot overflow
constexpr std::string_view integer = "Input should be a valid integer";

// The code point at `i` of valid UTF-8 text; moves `i` to the next one.
char32_t next_code_point(std::string_view text, std::size_t& i) {
    const auto byte = static_cast<unsigned char>(text[i++]);
    if (byte < 0x80) return byte;
    const int more = byte >= 0xF0 ? 3 : byte >= 0xE0 ? 2 : 1;
    char32_t code = byte & (0x3FU >> more);
    for (int k = 0; k < more && i < text.size(); ++k)
        code = code << 6 | (static_cast<unsigned char>(text[i++]) & 0x3FU);
    return code;
}

bool is_space(char32_t c) {
    return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

// Python's str.isprintable, except for unassigned code points.
bool is_printable(char32_t c) {
    const bool control = c < 0x20 || (c >= 0x7F && c < 0xA0) || c == 0xAD;
    const bool format = (c >= 0x200B && c <= 0x200F) || (c >= 0x202A && c <= 0x202E) || (c >= 0x2060 && c <= 0x206F) ||
                        c == 0xFEFF || (c >= 0xFFF0 && c <= 0xFFFB) || (c >= 0xE0000 && c <= 0xE007F);
    const bool nobodys = (c >= 0xE000 && c <= 0xF8FF) || c >= 0xF0000 || (c & 0xFFFE) == 0xFFFE;
    return !control && !format && !nobodys && (c == ' ' || !is_space(c));
}

std::string escaped(char32_t c) {
    std::array<char, 12> text{};
    std::snprintf(text.data(), text.size(),
                  c < 0x100     ? "\\x%02x"
                  : c < 0x10000 ? "\\u%04x"
                                : "\\U%08x",
                  static_cast<unsigned>(c));
    return text.data();
}

// " ".join(text.split())
std::string single_spaced(std::string_view text) {
    std::string out;
    for (std::size_t i = 0; i < text.size();) {
        const std::size_t begin = i;
        if (is_space(next_code_point(text, i))) {
            if (!out.empty() && out.back() != ' ') out += ' ';
        } else {
            out += text.substr(begin, i - begin);
        }
    }
    if (!out.empty() && out.back() == ' ') out.pop_back();
    return out;
}

}  // namespace

std::string repr(std::string_view text) {
    const bool double_quotes = text.find('\'') != text.npos && text.find('"') == text.npos;
    const char quote = double_quotes ? '"' : '\'';
    std::string out(1, quote);
    for (std::size_t i = 0; i < text.size();) {
        const std::size_t begin = i;
        const char32_t c = next_code_point(text, i);
        if (c == '\n' || c == '\r' || c == '\t') {
            out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
        } else if (c == '\\' || c == static_cast<char32_t>(quote)) {
            out += {'\\', static_cast<char>(c)};
        } else {
            out += is_printable(c) ? std::string(text.substr(begin, i - begin)) : escaped(c);
        }
    }
    return out + quote;
}

std::string repr(const Json& value) {
    if (value.is_null()) return "None";
    if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
    if (value.is_string()) return repr(std::string_view(value.get_ref<const std::string&>()));
    if (!value.is_structured()) return value.dump();
    std::string out;
    for (const auto& [key, item] : value.items()) {
        out += (out.empty() ? "" : ", ") + (value.is_object() ? repr(std::string_view(key)) + ": " : "") + repr(item);
    }
    return value.is_object() ? "{" + out + "}" : "[" + out + "]";
}

std::string Place::path() const {
    if (parent_ == nullptr) return key_;
    const std::string above = parent_->path();
    return parent_->parent_ == nullptr ? key_ : above + "." + key_;
}

void Place::refuse(const std::string& message, bool unknown_key) const {
    if (problems_.count++ == 0) {
        problems_.where = single_spaced(path());
        problems_.message = message;
        problems_.unknown_key = unknown_key;
        problems_.input = value_;
    }
}

void read_text(const Place& at, std::string& out) {
    if (!at.value().is_string()) return at.refuse("Input should be a valid string");
    out = at.value().get<std::string>();
}

void read_number(const Place& at, std::int64_t& out, const Range& range) {
    const Json& value = at.value();
    if (!value.is_number_integer()) return at.refuse(std::string(integer));
    const bool too_large = value.is_number_unsigned() && value.get<std::uint64_t>() > largest;
    if (too_large || value.get<std::int64_t>() < -largest) return at.refuse(std::string(integer) + " of at most 2^53");
    out = value.get<std::int64_t>();
    const auto wrong = [&](const char* what, std::int64_t bound) {
        at.refuse("Input should be " + std::string(what) + " " + std::to_string(bound));
    };
    if (out % range.multiple_of != 0) return wrong("a multiple of", range.multiple_of);
    if (out > range.max) return wrong("less than or equal to", range.max);
    if (out < range.min) return wrong("greater than or equal to", range.min);
    if (range.positive && out <= 0) return wrong("greater than", 0);
}

void read_share(const Place& at, double& out) {
    if (!at.value().is_number()) return at.refuse("Input should be a valid number");
    out = at.value().get<double>();
    if (!(out <= 1)) return at.refuse("Input should be less than or equal to 1");
    if (!(out >= 0)) return at.refuse("Input should be greater than or equal to 0");
}

void read_flag(const Place& at, bool& out) {
    if (!at.value().is_boolean()) return at.refuse("Input should be a valid boolean");
    out = at.value().get<bool>();
}

void read_choice(const Place& at, std::string& out, std::initializer_list<std::string_view> choices) {
    if (at.value().is_string()) {
        out = at.value().get<std::string>();
        if (std::find(choices.begin(), choices.end(), out) != choices.end()) return;
    }
    std::string listed;
    std::size_t i = 0;
    for (const std::string_view choice : choices) {
        listed += (i == 0 ? "" : i + 1 == choices.size() ? " or " : ", ") + ("'" + std::string(choice) + "'");
        ++i;
    }
    at.refuse("Input should be " + listed);
}

void read_sha256(const Place& at, std::string& out) {
    if (!at.value().is_string()) return at.refuse("Input should be a valid string");
    out = at.value().get<std::string>();
    const auto hex = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
    if (out.size() != 64 || !std::all_of(out.begin(), out.end(), hex)) {
        at.refuse("String should match pattern '^[0-9a-f]{64}$'");
    }
}

void read_file_name(const Place& at, std::string& out) {
    if (!at.value().is_string()) return at.refuse("Input should be a valid string");
    out = at.value().get<std::string>();
    const auto plain = [](char c) {
        return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
    };
    const auto inside = [&](char c) { return plain(c) || c == '.' || c == '-'; };
    if (out.empty() || out.size() > 100 || !plain(out[0]) || !std::all_of(out.begin(), out.end(), inside)) {
        at.refuse("Value error, " + repr(std::string_view(out)) +
                  " is not a plain file name, so it could point outside the bundle");
    }
}

void Object::nothing_else() const {
    if (!is_object_) return;
    for (const auto& [key, value] : at_.value().items()) {
        if (std::find(known_.begin(), known_.end(), key) == known_.end()) {
            Place(value, at_, key).refuse("Extra inputs are not permitted", true);
        }
    }
}

Json parse(const std::string& text) {
    if (text.starts_with("\xEF\xBB\xBF")) throw std::invalid_argument("expected value at line 1 column 1");
    const auto not_too_deep = [](int depth, Json::parse_event_t, Json&) {
        if (depth > deepest) throw std::invalid_argument("recursion limit exceeded");
        return true;
    };
    try {
        return Json::parse(text, not_too_deep);
    } catch (const Json::exception& error) {
        // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error ..."
        std::string reason = error.what();
        const std::size_t begin = reason.find("line ");
        if (begin != reason.npos) reason = reason.substr(begin);
        throw std::invalid_argument(single_spaced(reason));
    }
}

}  // namespace pass::strict
