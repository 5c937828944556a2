// Protobuf messages are read as they were written, and refused if they are damaged.
#include "backends/ort/protobuf.h"

#include "catch.hpp"
#include "errors.h"

using namespace pass;

TEST_CASE("fields are read as they were written", "[protobuf]") {
    const std::string text(300, 'x');
    // The last two are numbers of eight and four bytes, as in tensors of ONNX models.
    const std::string message = protobuf::encode(1, std::uint64_t{1} << 40) +
                                protobuf::encode(20, text) +
                                std::string(
                                    "\x19"
                                    "12345678"
                                    "\x25"
                                    "1234");
    const std::vector<protobuf::Field> result = protobuf::fields(message);
    REQUIRE(result.size() == 4);
    CHECK(result[0].number == 1);
    CHECK(result[0].content.empty());
    CHECK(result[1].number == 20);
    CHECK(result[1].content == text);
    CHECK(result[2].whole ==
          "\x19"
          "12345678");
    CHECK(result[3].number == 4);
    const auto shorter = [](std::string_view content) { return std::string(content.substr(1)); };
    const std::string changed = protobuf::replace(message, 20, shorter);
    CHECK(protobuf::fields(changed)[1].content == text.substr(1));
    CHECK(protobuf::replace(changed, 20, [&](std::string_view) { return text; }) == message);
}

TEST_CASE("damaged messages are refused", "[protobuf]") {
    const std::string message = protobuf::encode(7, protobuf::encode(5, "weights"));
    for (std::size_t size = 1; size < message.size(); ++size)
        CHECK_THROWS_AS(protobuf::fields(message.substr(0, size)), Error);
    CHECK_THROWS_AS(protobuf::fields("\x0b"), Error);  // a wire type that is no longer used
    CHECK_THROWS_AS(protobuf::fields(std::string(11, '\xff')), Error);  // a number without an end
    CHECK_THROWS_AS(protobuf::fields("\x0a\xff\xff\xff\xff\x7f"),
                    Error);  // a size that is too large
}
