// The KV cache of all slots: tensors [slots,KV heads,capacity,head size] of each layer's keys and
// values.
//
// Slots are the outermost dimension, so that a pass over the first b slots is bound to the
// beginning of every tensor, and the prefill of one slot to that slot's part.
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
    KVCache(Memory& memory, const Manifest& manifest, int slots);

    // The KV capacity in tokens; 0 until the first `resize`.
    std::int64_t capacity() const { return capacity_; }
    const std::string& dtype() const { return dtype_; }
    // The names of the trunk's inputs that are cache tensors.
    const std::vector<std::string>& names() const { return names_; }
    // The shape that every tensor has for a pass over `slots` slots.
    std::array<std::int64_t, 4> shape(int slots) const {
        return {slots, heads_, capacity_, head_dim_};
    }
    // The address of the part of `slot` in the tensor names()[index].
    std::byte* address(std::size_t index, int slot) const;
    // Copy the first lengths[slot] entries of every slot into new tensors for `capacity` tokens. If
    // it throws, the cache stays as it was.
    void resize(std::int64_t capacity, std::span<const std::int64_t> lengths);
    // Copy the first `length` entries of slot `source` to slot `target`.
    void copy_slot(int source, int target, std::int64_t length);
    // The bytes of the first `length` entries of a slot, in all tensors.
    std::size_t saved_bytes(std::int64_t length) const;
    // Copy the first `length` entries of `slot` to `target`: tensors [KV heads,length,head size].
    void save(int slot, std::int64_t length, std::byte* target);
    // Copy into `slot` the first `count` of the `length` entries that `save` wrote to `source`.
    void load(int slot, std::int64_t count, const std::byte* source, std::int64_t length);
    // Move the K/V of some rows of the last window, which begins after the first `length` entries
    // of `slot`, next to each other at its beginning. rows: rising, and the first is 0.
    void keep_rows(int slot, std::int64_t length, std::span<const std::int64_t> rows);

   private:
    // The bytes of `entries` cache entries in one head.
    std::size_t bytes_of(std::int64_t entries) const;
    // Copy `size` bytes of every head. Heads begin `target_pitch` and `source_pitch` bytes apart.
    void copy(std::byte* target, std::size_t target_pitch, const std::byte* source,
              std::size_t source_pitch, std::size_t size);

    Memory& memory_;
    int slots_;
    std::vector<std::string> names_;
    std::string dtype_;
    std::int64_t heads_, head_dim_, capacity_ = 0;
    std::vector<std::byte*> addresses_;
};

}  // namespace pass
