// The KV cache: tensors [slots,KV heads,capacity,head size] of each layer's keys and values. Slots
// come first, so that a pass over b slots is bound to the beginning of every tensor.
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

    // In tokens; 0 until the first `resize`.
    std::int64_t capacity() const { return capacity_; }
    const std::string& dtype() const { return dtype_; }
    // Of the trunk's inputs that are cache tensors.
    const std::vector<std::string>& names() const { return names_; }
    std::array<std::int64_t, 4> shape(int slots) const {
        return {slots, heads_, capacity_, head_dim_};
    }
    std::byte* address(std::size_t index, int slot) const;
    // Move the first lengths[slot] entries of every slot into new tensors. If it throws, the cache
    // stays as it was.
    void resize(std::int64_t capacity, std::span<const std::int64_t> lengths);
    void copy_slot(int source, int target, std::int64_t length);
    std::size_t saved_bytes(std::int64_t length) const;
    // Copy the first `length` entries of `slot` to `target`, as tensors [KV heads,length,head
    // size].
    void save(int slot, std::int64_t length, std::byte* target);
    // Copy into `slot` the first `count` of the `length` entries that `save` wrote to `source`.
    void load(int slot, std::int64_t count, const std::byte* source, std::int64_t length);

   private:
    // Of `entries` cache entries in one head.
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
