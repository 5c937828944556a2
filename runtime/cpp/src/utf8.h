// UTF-8: characters in bytes that may not be valid, files of text, and text for messages.
#pragma once

#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace pass {

// The character at an index of some bytes. size: how many bytes it has, or how many bytes are
// invalid together. begun: whether it is invalid only because the bytes end too early.
struct Utf8Character {
    std::size_t size = 0;
    bool valid = true;
    bool begun = false;
};

Utf8Character utf8_character(std::string_view bytes, std::size_t at);

// `bytes` with U+FFFD in place of each incomplete character (each_byte: of each invalid byte), as
// Python's errors="replace" and Rust's from_utf8_lossy have it.
std::string lossy_utf8(std::string_view bytes, bool each_byte = false);

// The number of bytes before an incomplete character at the end of `bytes`, or of all bytes.
std::size_t whole_characters(std::string_view bytes);

// `text` on one line, for messages: control characters and white space become single spaces.
std::string one_line(std::string_view text);

// The bytes of `file` up to its end, or to a read that is not full: otherwise a terminal's user
// would have to press Ctrl-D twice. None if `file` is null or reading fails; errno has the reason.
std::optional<std::string> read_bytes(std::FILE* file);

// The contents of a UTF-8 file; none if there is no such file. Throws Error if it cannot be read.
std::optional<std::string> read_text_file(const std::filesystem::path& path);

}  // namespace pass
