// Named device memory that several graphs are bound to. A name and shape always stand for the same memory, whose
// address never changes because captured graphs contain it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "backends/memory.h"
#include "bundle/bindings.h"

namespace pass {

using Shape = std::vector<std::int64_t>;

// Buffers by name and shape. A buffer with a row for each of `slots` slots is found by the shape of its row.
//
// scratch: names of buffers with rows whose content is not needed after a pass, such as logits. All shapes of such a
// name share memory if it is large enough; if it is not, at least twice as much is allocated, so that their sum
// stays below four times the largest.
class Buffers {
   public:
    Buffers(Memory& memory, int slots, std::set<std::string> scratch = {})
        : memory_(memory), slots_(slots), scratch_(std::move(scratch)) {}

    // The address of a binding's buffer, filled if it is a constant.
    std::byte* at(const Binding& binding);
    // The address of a buffer with a row of `shape` for every slot.
    std::byte* rows(const std::string& name, const Shape& shape, std::size_t item);
    // Write a buffer that has no rows for slots.
    void write(const std::string& name, const Shape& shape, const std::vector<std::int64_t>& values);
    // Write the row of `slot`, which has this `shape`.
    template <class Value>
    void write_row(const std::string& name, int slot, const Shape& shape, const Value* values, std::size_t count) {
        std::byte* first = rows(name, shape, sizeof(Value));
        const std::size_t size = count * sizeof(Value);
        memory_.upload(first + static_cast<std::size_t>(slot) * size, values, size);
    }
    // Write `values` into the row of `slot`, which has this `shape`, from index `first` of its first dimension on.
    void write_part(const std::string& name, int slot, const Shape& shape, std::int64_t first,
                    const std::vector<std::int64_t>& values);
    // Write the value of `slot` into a buffer with one value for every slot.
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
    struct Block {
        std::size_t size = 0;
        std::byte* address = nullptr;
    };

    std::byte* get(const std::string& name, const Shape& shape, std::int64_t items, std::size_t item);
    std::byte* shared(const std::string& name, std::size_t size);

    Memory& memory_;
    int slots_;
    std::set<std::string> scratch_;
    std::map<std::string, Block> largest_;  // by name, of a scratch buffer
    std::map<std::pair<std::string, Shape>, std::byte*> addresses_;
    std::set<std::byte*> filled_;
};

// The noise input of tails: for every slot and position, offsets into the bundle's table of random numbers. A slot's
// row has an entry for every position of the longest text. Entries are written in blocks, when a pass may read beyond
// those that are there, so that starting a request takes no longer with a larger KV capacity.
class NoiseRows {
   public:
    // positions: the length of a row. streams: how many of `noise_streams` the bundle's tails read.
    NoiseRows(Buffers& buffers, std::size_t streams, int slots, std::int64_t positions)
        : buffers_(buffers), streams_(streams), positions_(positions), rows_(static_cast<std::size_t>(slots)) {}

    // A new request is in `slot`, with this seed; none if it samples greedily and needs no noise.
    void begin(int slot, std::optional<std::uint64_t> seed);
    // Make sure that the row of `slot` is filled for the positions from `first` up to, without, `stop`.
    void cover(int slot, std::int64_t first, std::int64_t stop);

   private:
    struct Row {
        std::optional<std::uint64_t> seed;
        std::int64_t first = 0, stop = 0;  // the filled positions, without `stop`
    };

    Buffers& buffers_;
    std::size_t streams_;
    std::int64_t positions_;
    std::vector<Row> rows_;
};

}  // namespace pass
