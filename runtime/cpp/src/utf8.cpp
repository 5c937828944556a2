#include "utf8.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "errors.h"

namespace pass {

namespace {

constexpr const char* replacement = "\xEF\xBF\xBD";  // U+FFFD

// What a character's first byte says: the character's size in bytes (0: no character begins with
// this byte), and the range of its second byte, which excludes overlong forms and surrogates.
struct Lead {
    std::size_t size;
    unsigned char low = 0x80, high = 0xBF;
};

Lead lead_of(unsigned char first) {
    if (first < 0x80) return {1};
    if (first >= 0xC2 && first <= 0xDF) return {2};
    if (first == 0xE0) return {3, 0xA0};
    if (first == 0xED) return {3, 0x80, 0x9F};
    if (first > 0xE0 && first <= 0xEF) return {3};
    if (first == 0xF0) return {4, 0x90};
    if (first == 0xF4) return {4, 0x80, 0x8F};
    if (first > 0xF0 && first < 0xF4) return {4};
    return {0};
}

}  // namespace

Utf8Character utf8_character(std::string_view bytes, std::size_t index) {
    const Lead lead = lead_of(static_cast<unsigned char>(bytes[index]));
    if (lead.size == 0) return {1, false};
    for (std::size_t k = 1; k < lead.size; ++k) {
        if (index + k == bytes.size()) return {k, false, true};
        const auto byte = static_cast<unsigned char>(bytes[index + k]);
        const int low = k == 1 ? lead.low : 0x80, high = k == 1 ? lead.high : 0xBF;
        if (byte < low || byte > high) return {k, false};
    }
    return {lead.size, true};
}

std::string lossy_utf8(std::string_view bytes, bool each_byte) {
    std::string text;
    for (std::size_t i = 0; i < bytes.size();) {
        const Utf8Character character = utf8_character(bytes, i);
        if (character.valid) {
            text += bytes.substr(i, character.size);
        } else {
            for (std::size_t k = 0; k < (each_byte ? character.size : 1); ++k) text += replacement;
        }
        i += character.size;
    }
    return text;
}

std::size_t whole_characters(std::string_view bytes) {
    for (std::size_t i = 0; i < bytes.size();) {
        const Utf8Character character = utf8_character(bytes, i);
        if (character.cut_off) return i;
        i += character.size;
    }
    return bytes.size();
}

std::string one_line(std::string_view text) {
    std::string line;
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte > ' ' && byte != 0x7F) {
            line += c;
        } else if (!line.empty() && line.back() != ' ') {
            line += ' ';
        }
    }
    if (line.ends_with(' ')) line.pop_back();
    return line;
}

std::optional<std::string> read_bytes(std::FILE* file) {
    if (file == nullptr) return std::nullopt;
    std::string bytes;
    std::array<char, 1 << 16> piece{};
    std::size_t size = piece.size();
    while (size == piece.size()) {
        size = std::fread(piece.data(), 1, piece.size(), file);
        bytes.append(piece.data(), size);
    }
    return std::ferror(file) == 0 ? std::optional(std::move(bytes)) : std::nullopt;
}

std::optional<std::string> read_file(const std::filesystem::path& path) {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                               std::fclose);
    return read_bytes(file.get());
}

std::optional<std::string> read_text_file(const std::filesystem::path& path) {
    std::optional<std::string> text = read_file(path);
    if (!text && (errno == ENOENT || errno == ENOTDIR)) return std::nullopt;
    if (!text) throw Error("cannot read " + path.string() + ": " + std::strerror(errno));
    if (lossy_utf8(*text) != *text)
        throw Error("cannot read " + path.string() + ": it is not UTF-8");
    return text;
}

}  // namespace pass
