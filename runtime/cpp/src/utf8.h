// Characters in bytes that may not be text.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pass {

// What begins at a place of some bytes: a character, or as many bytes as might have become one.
struct Utf8Character {
    std::size_t size = 0;
    const char* fault = nullptr;  // as Python words it; null where it is whole
};

Utf8Character utf8_character(std::string_view bytes, std::size_t at);

// With U+FFFD for what is no character, as Python's errors="replace" and Rust's from_utf8_lossy have it.
std::string lossy_utf8(std::string_view bytes);

}  // namespace pass
