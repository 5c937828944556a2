// ONNX models are messages of protobuf (https://protobuf.dev/programming-guides/encoding/). The
// numbers of their fields are in onnx.proto.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace pass::protobuf {

// A field of a message. whole: all its bytes. content: its text, bytes or message; else empty.
struct Field {
    std::uint64_t number = 0;
    std::string_view whole;
    std::string_view content;
};

// The bytes of field `number` with this content (text, bytes or a message), or with this value.
std::string encode(std::uint64_t number, std::string_view content);
std::string encode(std::uint64_t number, std::uint64_t value);

// The fields of `message`, which must outlive them. Throws Error if it is no message.
std::vector<Field> fields(std::string_view message);

// `message` with `edit` applied to the contents of fields `number`. Throws Error as `fields` does.
std::string replace(std::string_view message, std::uint64_t number,
                    const std::function<std::string(std::string_view)>& edit);

}  // namespace pass::protobuf
