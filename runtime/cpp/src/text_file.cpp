#include "text_file.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "bundle/strict_json.h"
#include "errors.h"
#include "utf8.h"

namespace pass {

namespace {

std::string undecodable(const std::string& text, std::size_t begin, std::size_t count, const char* why) {
    std::array<char, 8> byte{};
    std::snprintf(byte.data(), byte.size(), "0x%02x", static_cast<unsigned char>(text[begin]));
    const std::string at = std::to_string(begin);
    return "'utf-8' codec can't decode " +
           (count == 1 ? "byte " + std::string(byte.data()) + " in position " + at
                       : "bytes in position " + at + "-" + std::to_string(begin + count - 1)) +
           ": " + why;
}

// Why `text` is not UTF-8, as Python words it.
std::optional<std::string> not_utf8(const std::string& text) {
    for (std::size_t i = 0; i < text.size();) {
        const Utf8Character character = utf8_character(text, i);
        if (character.fault != nullptr) return undecodable(text, i, character.size, character.fault);
        i += character.size;
    }
    return std::nullopt;
}

}  // namespace

std::string plain_path(const std::filesystem::path& path) {
    std::string plain = path.has_root_directory() ? "/" : "";
    for (const std::filesystem::path& part : path.relative_path()) {
        if (part.empty() || part == ".") continue;
        plain = joined_path(plain, part.string());
    }
    return plain.empty() ? "." : plain;
}

std::string joined_path(const std::string& directory, const std::string& name) {
    if (directory.empty() || directory == ".") return name;
    return directory + (directory.back() == '/' ? "" : "/") + name;
}

std::optional<std::string> read_text_file(const std::string& path) {
    const auto fail = [&](const std::string& why) -> Error { return Error("cannot read " + path + ": " + why); };
    const auto system_error = [&] {
        return fail("[Errno " + std::to_string(errno) + "] " + std::strerror(errno) + ": " +
                    strict::repr(std::string_view(path)));
    };
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
    if (!file && (errno == ENOENT || errno == ENOTDIR)) return std::nullopt;
    if (!file) throw system_error();
    std::string text;
    std::array<char, 1 << 16> piece{};
    while (const std::size_t size = std::fread(piece.data(), 1, piece.size(), file.get())) {
        text.append(piece.data(), size);
    }
    if (std::ferror(file.get()) != 0) throw system_error();
    if (const auto why = not_utf8(text)) throw fail(*why);
    return text;
}

}  // namespace pass
