#include "backends/ort/protobuf.h"

#include "errors.h"

namespace pass::protobuf {

namespace {

// How the bytes after a field's tag are laid out: the lowest three bits of the tag.
enum Kind : std::uint64_t { varint = 0, eight_bytes = 1, delimited = 2, four_bytes = 5 };

// Seven bits of `value` in each byte, the lowest first. The eighth bit says whether a byte follows.
std::string encode_varint(std::uint64_t value) {
    std::string digits;
    for (; value > 0x7F; value >>= 7) digits += static_cast<char>((value & 0x7F) | 0x80);
    return digits + static_cast<char>(value);
}

// Reads the fields of a message one after another.
class Reader {
   public:
    explicit Reader(std::string_view message) : message_(message) {}

    bool ended() const { return at_ == message_.size(); }

    Field field() {
        const std::size_t start = at_;
        const std::uint64_t tag = number();
        Field result{tag >> 3, {}, {}};
        switch (tag & 7) {
            case varint: number(); break;
            case delimited: result.content = take(number()); break;
            case eight_bytes: take(8); break;
            case four_bytes: take(4); break;
            default: throw Error("a protobuf field of an unknown kind");
        }
        result.whole = message_.substr(start, at_ - start);
        return result;
    }

   private:
    std::uint64_t number() {
        std::uint64_t value = 0;
        for (unsigned shift = 0; shift < 64 && !ended(); shift += 7) {
            const auto byte = static_cast<unsigned char>(message_[at_++]);
            value |= std::uint64_t{byte & 0x7FU} << shift;
            if (byte < 0x80) return value;
        }
        throw Error("a protobuf number has no end");
    }
    std::string_view take(std::uint64_t size) {
        if (size > message_.size() - at_) throw Error("a protobuf field goes on after its message");
        at_ += size;
        return message_.substr(at_ - size, size);
    }

    std::string_view message_;
    std::size_t at_ = 0;
};

}  // namespace

std::string encode(std::uint64_t number, std::string_view content) {
    return encode_varint(number << 3 | delimited) + encode_varint(content.size()) +
           std::string(content);
}

std::string encode(std::uint64_t number, std::uint64_t value) {
    return encode_varint(number << 3 | varint) + encode_varint(value);
}

std::vector<Field> fields(std::string_view message) {
    std::vector<Field> result;
    for (Reader reader(message); !reader.ended();) result.push_back(reader.field());
    return result;
}

std::string replace(std::string_view message, std::uint64_t number,
                    const std::function<std::string(std::string_view)>& edit) {
    std::string changed;
    for (const Field& field : fields(message)) {
        changed +=
            field.number == number ? encode(number, edit(field.content)) : std::string(field.whole);
    }
    return changed;
}

}  // namespace pass::protobuf
