// The KV cache of all slots: a tensor [slots,KVH,S,D] for every layer's keys and values.
//
// Slots are the outermost dimension: a pass over the first b slots is bound to the front of every tensor, and prefill
// of one slot to that slot's part.
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
    // spare_entries: S is larger than the capacity by the entries that a pass may overwrite after its window.
    KVCache(Memory& memory, const Manifest& manifest, int slots, std::int64_t spare_entries);

    // The KV capacity in tokens; 0 until the first `resize`.
    std::int64_t capacity() const { return capacity_; }
    const std::string& dtype() const { return dtype_; }
    // The names of these tensors among the trunk's inputs.
    const std::vector<std::string>& names() const { return names_; }
    // The shape of every tensor, as a pass over `slots` slots sees it.
    std::array<std::int64_t, 4> shape(int slots) const { return {slots, heads_, capacity_ + spare_, head_dim_}; }
    // The address where the part of `slot` begins in tensor `index`.
    std::byte* place(std::size_t index, int slot) const;
    // Move the first lengths[slot] tokens of every slot into tensors of `capacity` tokens. If memory runs out, the
    // cache stays as it was.
    void resize(std::int64_t capacity, std::span<const std::int64_t> lengths);
    // Copy the first `length` tokens of slot `source` into slot `target`.
    void move(int source, int target, std::int64_t length);
    // The bytes of the first `length` tokens of a slot, in all tensors.
    std::size_t saved_bytes(std::int64_t length) const;
    // Copy the first `length` tokens of `slot` to `address`, one tensor [KVH,length,D] after another.
    void save(int slot, std::int64_t length, std::byte* address);
    // Copy the first `count` of the `length` tokens that `save` copied to `address` into `slot`.
    void load(int slot, std::int64_t count, const std::byte* address, std::int64_t length);
    // Of a window that was written after the first `length` tokens of `slot`, keep the entries of these `rows` (rising,
    // of which the first is 0), one after another.
    void keep_rows(int slot, std::int64_t length, std::span<const std::int64_t> rows);

   private:
    std::size_t token_bytes() const;                      // of one head, for one token
    std::size_t head_bytes(std::int64_t capacity) const;  // of one head of one slot

    Memory& memory_;
    int slots_;
    std::vector<std::string> names_;
    std::string dtype_;
    std::int64_t heads_, head_dim_, spare_, capacity_ = 0;
    std::vector<std::byte*> addresses_;
};

}  // namespace pass
