// The KV cache of all slots: tensors [slots,KVH,S,HD] (KV heads, entries, head size) for each
// layer's keys and values.
//
// Slots are the outermost dimension, so that a pass over b slots is bound to the beginning of every
// tensor, and the prefill of one slot to that slot's part.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backends/memory.h"
#include "bundle/manifest.h"

namespace pass {

class KVCache {
   public:
    // S is the capacity plus `spare_entries`, which a pass may overwrite after its window.
    KVCache(Memory& memory, const Manifest& manifest, int slots, std::int64_t spare_entries);

    // The KV capacity in tokens; 0 until the first `resize`.
    std::int64_t capacity() const { return capacity_; }
    const std::string& dtype() const { return dtype_; }
    // The names of the trunk's inputs that are cache tensors.
    const std::vector<std::string>& names() const { return names_; }
    // The shape that every tensor has for a pass over `slots` slots.
    std::array<std::int64_t, 4> shape(int slots) const {
        return {slots, heads_, capacity_ + spare_, head_dim_};
    }
    // The address at which `slot` begins in the tensor names()[index].
    std::byte* place(std::size_t index, int slot) const;
    // Copy the first lengths[slot] entries of every slot into new tensors for `capacity` tokens, or
    // throw and change nothing.
    void resize(std::int64_t capacity, std::span<const std::int64_t> lengths);
    // Copy the first `length` entries of slot `source` to slot `target`.
    void move(int source, int target, std::int64_t length);
    // The bytes of the first `length` entries of a slot, in all tensors.
    std::size_t saved_bytes(std::int64_t length) const;
    // Copy the first `length` entries of `slot` to `address`, tensor [KVH,length,HD] by tensor.
    void save(int slot, std::int64_t length, std::byte* address);
    // Copy into `slot` the first `count` of the `length` entries that `save` wrote to `address`.
    void load(int slot, std::int64_t count, const std::byte* address, std::int64_t length);
    // Move entries of a window next to each other, to its beginning, which is after the first
    // `length` entries of `slot`. rows: their rows in the window, rising from 0.
    void keep_rows(int slot, std::int64_t length, std::span<const std::int64_t> rows);

   private:
    std::size_t entry_bytes() const;                 // of one token's entry in one head
    std::size_t pitch(std::int64_t capacity) const;  // bytes of one head of one slot

    Memory& memory_;
    int slots_;
    std::vector<std::string> names_;
    std::string dtype_;
    std::int64_t heads_, head_dim_, spare_, capacity_ = 0;
    std::vector<std::byte*> addresses_;
};

}  // namespace pass
