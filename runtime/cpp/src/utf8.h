#pragma once

#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace pass {

// A character, or invalid bytes that one U+FFFD replaces. size: in bytes. cut_off: invalid only
// because more bytes would have to follow.
struct Utf8Character {
    std::size_t size = 0;
    bool valid = true;
    bool cut_off = false;
};

Utf8Character utf8_character(std::string_view bytes, std::size_t index);

// With U+FFFD in place of each invalid character (each_byte: byte), as Rust's from_utf8_lossy.
std::string lossy_utf8(std::string_view bytes, bool each_byte = false);

// How many of `bytes` precede a character that is cut off at their end.
std::size_t whole_characters(std::string_view bytes);

// Each run of control characters and spaces becomes one space.
std::string one_line(std::string_view text);

// None if `file` is null or reading fails; errno then has the reason. A short read counts as the
// end, or Ctrl-D would have to be pressed twice.
std::optional<std::string> read_bytes(std::FILE* file);

// None if it cannot be read; errno then has the reason.
std::optional<std::string> read_file(const std::filesystem::path& path);

// None if there is no such file. Throws Error if it is not readable UTF-8.
std::optional<std::string> read_text_file(const std::filesystem::path& path);

}  // namespace pass
