// UTF-8 characters in bytes that may not be valid UTF-8.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pass {

// The character that begins at a place: its `size` in bytes, or the size of the invalid bytes there and their `fault`.
struct Utf8Character {
    std::size_t size = 0;
    const char* fault = nullptr;  // Python's reason why it cannot be decoded; null for a valid character
};

Utf8Character utf8_character(std::string_view bytes, std::size_t at);

// `bytes` with U+FFFD in place of invalid bytes, as Python's errors="replace" and Rust's from_utf8_lossy have it.
std::string lossy_utf8(std::string_view bytes);

}  // namespace pass
