// Named device memory that several graphs are bound to: the same name and shape is the same memory.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "memory.h"

namespace pass {

using Shape = std::vector<std::int64_t>;

// Buffers by name and shape; those with a row for each of `slots` slots are found by their row's shape.
class Buffers {
   public:
    Buffers(Memory& memory, int slots) : memory_(memory), slots_(slots) {}

    // The address of a binding's buffer, filled if it is a constant.
    std::byte* at(const Binding& binding);
    // The address of a buffer with a row of `shape` for every slot.
    std::byte* rows(const std::string& name, const Shape& shape, std::size_t item);
    // Fill a buffer that has no rows for slots.
    void write(const std::string& name, const Shape& shape, const std::vector<std::int64_t>& values);
    // Fill the row of `slot`, of `shape`.
    template <class Value>
    void write_row(const std::string& name, int slot, const Shape& shape, const Value* values, std::size_t count) {
        std::byte* first = rows(name, shape, sizeof(Value));
        const std::size_t size = count * sizeof(Value);
        memory_.upload(first + static_cast<std::size_t>(slot) * size, values, size);
    }
    // Fill the number of `slot`.
    template <class Value>
    void write_number(const std::string& name, int slot, Value value) {
        write_row(name, slot, {}, &value, 1);
    }
    // The first `count` rows of a buffer with a row of `shape` for every slot.
    template <class Value>
    std::vector<Value> read(const std::string& name, int count, const Shape& shape) {
        std::size_t values = static_cast<std::size_t>(count);
        for (std::int64_t size : shape) values *= static_cast<std::size_t>(size);
        std::vector<Value> found(values);
        memory_.download(found.data(), rows(name, shape, sizeof(Value)), values * sizeof(Value));
        return found;
    }

   private:
    std::byte* get(const std::string& name, const Shape& shape, std::int64_t items, std::size_t item);

    Memory& memory_;
    int slots_;
    std::map<std::pair<std::string, Shape>, std::byte*> addresses_;
    std::set<std::byte*> filled_;
};

}  // namespace pass
