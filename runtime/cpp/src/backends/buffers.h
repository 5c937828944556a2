#pragma once

#include <array>
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

// The device memory that graphs are bound to. A buffer of one name and shape stays at its address,
// because captured CUDA graphs contain addresses. Buffers with a row for each slot are called by
// the shape of one row.
//
// transient: names of buffers that are not needed after the pass that wrote them, such as logits.
// All shapes of such a name share a block. If it is too small, a new one of at least twice its size
// is allocated, so that all blocks take less than four times the largest buffer.
class Buffers {
   public:
    Buffers(Memory& memory, int slots, std::set<std::string> transient = {})
        : memory_(memory), slots_(slots), transient_(std::move(transient)) {}

    // The first call writes a constant there.
    std::byte* address_of(const Binding& binding);
    // The buffer with a row of `shape` for every slot. item_size: in bytes.
    std::byte* rows_address(const std::string& name, const Shape& shape, std::size_t item_size);
    // A whole buffer that has no rows for slots.
    void write(const std::string& name, const Shape& shape,
               const std::vector<std::int64_t>& values);
    template <class Values>
    void write_row(const std::string& name, int slot, const Shape& shape, const Values& values) {
        const std::size_t item_size = sizeof(*values.data()), size = values.size() * item_size;
        std::byte* rows = rows_address(name, shape, item_size);
        memory_.upload(rows + static_cast<std::size_t>(slot) * size, values.data(), size);
    }
    // From index `first` of dimension 0 on.
    void write_part(const std::string& name, int slot, const Shape& shape, std::int64_t first,
                    const std::vector<std::int64_t>& values);
    template <class Value>
    void write_number(const std::string& name, int slot, Value value) {
        write_row(name, slot, {}, std::array{value});
    }
    // The first `count` rows.
    template <class Value>
    std::vector<Value> read(const std::string& name, int count, const Shape& shape) {
        std::size_t elements = static_cast<std::size_t>(count);
        for (std::int64_t size : shape) elements *= static_cast<std::size_t>(size);
        std::vector<Value> values(elements);
        memory_.download(values.data(), rows_address(name, shape, sizeof(Value)),
                         elements * sizeof(Value));
        return values;
    }

   private:
    struct Block {
        std::size_t size = 0;  // in bytes
        std::byte* address = nullptr;
    };

    // key: the buffer's shape; with a row for every slot, -1 and the shape of a row.
    std::byte* address(const std::string& name, const Shape& key, std::int64_t elements,
                       std::size_t item_size);
    std::byte* transient_address(const std::string& name, std::size_t size);

    Memory& memory_;
    int slots_;
    std::set<std::string> transient_;
    std::map<std::string, Block> newest_blocks_;                     // by name in `transient`
    std::map<std::pair<std::string, Shape>, std::byte*> addresses_;  // by name and key
    std::set<std::byte*> filled_;  // addresses of buffers whose constants were written
};

// The noise offsets that tails read: a row [positions,2] for every slot and stream, filled piece by
// piece, so that starting a request does not take longer with a larger KV capacity.
class NoiseRows {
   public:
    // streams: how many of `noise_streams` the tails read.
    NoiseRows(Buffers& buffers, std::size_t streams, int slots, std::int64_t positions)
        : buffers_(buffers),
          streams_(streams),
          positions_(positions),
          rows_(static_cast<std::size_t>(slots)) {}

    // Start another text. seed: none for greedy decoding, which needs no noise.
    void begin(int slot, std::optional<std::uint64_t> seed);
    // Fill positions `first` .. `stop`-1 unless they are filled.
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
