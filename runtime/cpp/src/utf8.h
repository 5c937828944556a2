// UTF-8: the characters of bytes that may be invalid, files of text, and text for messages.
#pragma once

#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace pass {

// A character, or invalid bytes that one U+FFFD replaces. size: how many bytes. cut_off: whether
// they are invalid only because more bytes would have to follow.
struct Utf8Character {
    std::size_t size = 0;
    bool valid = true;
    bool cut_off = false;
};

// The character that begins at `index` of `bytes`.
Utf8Character utf8_character(std::string_view bytes, std::size_t index);

// `bytes` with U+FFFD in place of each invalid character (each_byte: of each invalid byte), like
// Python's errors="replace" and Rust's from_utf8_lossy.
std::string lossy_utf8(std::string_view bytes, bool each_byte = false);

// How many of `bytes` precede a character that is cut off at their end; all if none is cut off.
std::size_t whole_characters(std::string_view bytes);

// `text` on one line, for messages: each run of control characters and spaces becomes one space.
std::string one_line(std::string_view text);

// The bytes of `file` up to its end. A read of fewer bytes than asked for counts as the end,
// because in a terminal Ctrl-D would have to be pressed twice otherwise. None if `file` is null or
// reading fails; errno then has the reason.
std::optional<std::string> read_bytes(std::FILE* file);

// The text of a UTF-8 file; none if there is no such file. Throws Error if it is not readable text.
std::optional<std::string> read_text_file(const std::filesystem::path& path);

}  // namespace pass
