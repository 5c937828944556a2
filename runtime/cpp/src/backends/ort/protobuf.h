// Messages of protobuf (https://protobuf.dev/programming-guides/encoding/), which ONNX models are.
// The numbers of their fields are in onnx.proto.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace pass::protobuf {

// A field. whole: all its bytes. content: of text, bytes or a message; else empty.
struct Field {
    std::uint64_t number = 0;
    std::string_view whole;
    std::string_view content;
};

// A field with this content, and one with a number.
std::string encode(std::uint64_t number, std::string_view content);
std::string encode(std::uint64_t number, std::uint64_t value);

// The fields of a message, which must outlive them. Throws Error if it is not one.
std::vector<Field> fields(std::string_view message);

// `message` with `edit` applied to the content of all fields `number`. Throws Error if it is none.
std::string replace(std::string_view message, std::uint64_t number,
                    const std::function<std::string(std::string_view)>& edit);

}  // namespace pass::protobuf
