// Reads JSON into structs as strictly as pydantic does in the Python runtime: without conversions, and unknown keys are
// refused. Every problem is counted, and the first one is kept with its place.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pass::strict {

using Json = nlohmann::ordered_json;

// The problems of a document.
struct Problems {
    int count = 0;
    std::string where;  // the place of the first one, such as `model.vocab_size`
    std::string message;
    bool unknown_key = false;
    Json input;  // the value at that place
};

// A value and its place in the document. The place of a nested value refers to that of its parent, which must outlive
// it.
class Place {
   public:
    Place(const Json& value, Problems& problems) : value_(value), problems_(problems) {}
    Place(const Json& value, const Place& parent, std::string key)
        : value_(value), problems_(parent.problems_), parent_(&parent), key_(std::move(key)) {}

    const Json& value() const { return value_; }
    int problems() const { return problems_.count; }
    void refuse(const std::string& message, bool unknown_key = false) const;

   private:
    std::string path() const;

    const Json& value_;
    Problems& problems_;
    const Place* parent_ = nullptr;
    std::string key_;
};

struct Range {
    std::int64_t min = std::numeric_limits<std::int64_t>::min();
    std::int64_t max = std::numeric_limits<std::int64_t>::max();
    std::int64_t multiple_of = 1;
    bool positive = false;  // "greater than 0", which pydantic words otherwise than a minimum of 1
};

// Each reads a value of one kind, or records what it should be.
void read_text(const Place& at, std::string& out);
void read_number(const Place& at, std::int64_t& out, const Range& range = {});
void read_share(const Place& at, double& out);  // 0 to 1
void read_flag(const Place& at, bool& out);
void read_choice(const Place& at, std::string& out, std::initializer_list<std::string_view> choices);
void read_sha256(const Place& at, std::string& out);
// A file name that cannot point outside its directory.
void read_file_name(const Place& at, std::string& out);
// Python's repr of a string, for messages.
std::string repr(std::string_view text);
// Python's repr of the value that json.loads returns.
std::string repr(const Json& value);

template <class T, class Read>
void read_optional(const Place& at, std::optional<T>& out, Read read) {
    if (at.value().is_null()) {
        out.reset();
    } else {
        read(at, out.emplace());
    }
}

template <class T, class Read>
void read_list(const Place& at, std::vector<T>& out, Read read, bool may_be_empty = true) {
    out.clear();
    if (!at.value().is_array()) return at.refuse("Input should be a valid array");
    std::size_t i = 0, good = 0;
    for (const Json& item : at.value()) {
        const int before = at.problems();
        read(Place(item, at, std::to_string(i++)), out.emplace_back());
        good += at.problems() == before ? 1 : 0;
    }
    if (good == 0 && !may_be_empty) at.refuse("Tuple should have at least 1 item after validation, not 0");
}

template <class T, class ReadKey, class Read>
void read_mapping(const Place& at, std::vector<std::pair<std::string, T>>& out, ReadKey read_key, Read read) {
    out.clear();
    if (!at.value().is_object()) return at.refuse("Input should be an object");
    for (const auto& [key, value] : at.value().items()) {
        auto& [name, of_name] = out.emplace_back();
        const Json key_value = key;
        const Place item(value, at, key);
        read_key(Place(key_value, item, "[key]"), name);
        read(item, of_name);
    }
}

// Reads the fields of a struct from an object: each in the order of declaration, then `nothing_else` refuses other
// keys.
class Object {
   public:
    explicit Object(const Place& at) : at_(at), is_object_(at.value().is_object()) {
        if (!is_object_) at.refuse("Input should be an object");
    }
    Object(const Object&) = delete;
    Object& operator=(const Object&) = delete;

    template <class T, class Read>
    Object& field(const char* name, T& out, Read read) {
        return take(name, out, read, true);
    }
    // A field that may be missing; `out` then stays as it is.
    template <class T, class Read>
    Object& default_field(const char* name, T& out, Read read) {
        return take(name, out, read, false);
    }
    void nothing_else() const;

   private:
    template <class T, class Read>
    Object& take(const char* name, T& out, Read read, bool needed) {
        if (!is_object_) return *this;
        known_.push_back(name);
        const auto found = at_.value().find(name);
        if (found != at_.value().end()) {
            read(Place(*found, at_, name), out);
        } else if (needed) {
            Place(at_.value(), at_, name).refuse("Field required");
        }
        return *this;
    }

    const Place& at_;
    bool is_object_;
    std::vector<std::string_view> known_;
};

// Parses `text`. Throws std::invalid_argument with a reason in one line where it is not JSON.
Json parse(const std::string& text);

}  // namespace pass::strict
