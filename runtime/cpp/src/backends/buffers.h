// Device memory by name and shape, which several graphs are bound to.
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

// A name and a shape always have the same address, because captured CUDA graphs contain addresses.
// A buffer with a row for each of `slots` slots is looked up by the shape of a row.
//
// transient: names of buffers with rows whose content, such as logits, is not needed after the pass
// that wrote it. All shapes of such a name share memory. If their block is too small for a shape, a
// new one of at least twice the size is allocated, so that all blocks together take less than four
// times the largest buffer.
class Buffers {
   public:
    Buffers(Memory& memory, int slots, std::set<std::string> transient = {})
        : memory_(memory), slots_(slots), transient_(std::move(transient)) {}

    // The address of a binding's buffer. The first call writes the binding's constant, if any.
    std::byte* address_of(const Binding& binding);
    // The address of a buffer with a row of `shape` for every slot. item_size: bytes of an element.
    std::byte* rows_address(const std::string& name, const Shape& shape, std::size_t item_size);
    // Write a whole buffer that has no rows for slots.
    void write(const std::string& name, const Shape& shape,
               const std::vector<std::int64_t>& values);
    // Write the row of `slot`, which has this `shape`.
    template <class Value>
    void write_row(const std::string& name, int slot, const Shape& shape, const Value* values,
                   std::size_t count) {
        std::byte* first = rows_address(name, shape, sizeof(Value));
        const std::size_t size = count * sizeof(Value);
        memory_.upload(first + static_cast<std::size_t>(slot) * size, values, size);
    }
    // Write `values` to the row of `slot`, of this `shape`, from index `first` of dimension 0 on.
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
        std::vector<Value> result(values);
        memory_.download(result.data(), rows_address(name, shape, sizeof(Value)),
                         values * sizeof(Value));
        return result;
    }

   private:
    struct Block {
        std::size_t size = 0;
        std::byte* address = nullptr;
    };

    std::byte* address(const std::string& name, const Shape& key, std::int64_t elements,
                       std::size_t item_size);
    std::byte* transient_address(const std::string& name, std::size_t size);

    Memory& memory_;
    int slots_;
    std::set<std::string> transient_;
    std::map<std::string, Block> largest_;  // the newest block, by name of a transient buffer
    // By name and key, which is the shape, or -1 and the shape of a row.
    std::map<std::pair<std::string, Shape>, std::byte*> addresses_;
    std::set<std::byte*> filled_;  // buffers that hold their constants
};

// The noise offsets that the tails read, into tables of random numbers (bundle/noise.h): a row of N
// positions for every slot. A row is filled only from the slot's present position to some way
// beyond its next pass, so that the cost of starting a request does not grow with the KV capacity.
class NoiseRows {
   public:
    // streams: how many of `noise_streams` the bundle's tails read.
    NoiseRows(Buffers& buffers, std::size_t streams, int slots, std::int64_t positions)
        : buffers_(buffers),
          streams_(streams),
          positions_(positions),
          rows_(static_cast<std::size_t>(slots)) {}

    // Start another text in `slot`. seed: none if it is decoded greedily and needs no noise.
    void begin(int slot, std::optional<std::uint64_t> seed);
    // Fill positions `first` .. `stop`-1 of the row of `slot` unless they are filled.
    void cover(int slot, std::int64_t first, std::int64_t stop);

   private:
    struct Row {
        std::optional<std::uint64_t> seed;
        std::int64_t first = 0, stop = 0;  // positions `first` .. `stop`-1 are filled
    };

    Buffers& buffers_;
    std::size_t streams_;
    std::int64_t positions_;
    std::vector<Row> rows_;
};

}  // namespace pass
