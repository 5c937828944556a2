#include "utf8.h"

namespace pass {

namespace {

constexpr const char* replacement = "\xEF\xBF\xBD";

// What a character's first byte says: the character's size in bytes (0: no character begins so), and the range of its
// second byte.
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

Utf8Character utf8_character(std::string_view bytes, std::size_t at) {
    const Lead lead = lead_of(static_cast<unsigned char>(bytes[at]));
    if (lead.size == 0) return {1, "invalid start byte"};
    for (std::size_t k = 1; k < lead.size; ++k) {
        if (at + k == bytes.size()) return {k, "unexpected end of data"};
        const auto byte = static_cast<unsigned char>(bytes[at + k]);
        const bool good = k > 1 ? byte >= 0x80 && byte <= 0xBF : byte >= lead.low && byte <= lead.high;
        if (!good) return {k, "invalid continuation byte"};
    }
    return {lead.size, nullptr};
}

std::string lossy_utf8(std::string_view bytes) {
    std::string text;
    for (std::size_t i = 0; i < bytes.size();) {
        const Utf8Character character = utf8_character(bytes, i);
        text += character.fault == nullptr ? bytes.substr(i, character.size) : replacement;
        i += character.size;
    }
    return text;
}

}  // namespace pass
