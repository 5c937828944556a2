#include "backends/kv_cache.h"

#include "bundle/bindings.h"

namespace pass {

KVCache::KVCache(Memory& memory, const Manifest& manifest, int slots)
    : memory_(memory),
      slots_(slots),
      heads_(manifest.model.kv_heads),
      head_dim_(manifest.model.head_dim) {
    for (const Tensor& tensor : manifest.trunk.inputs) {
        if (!tensor.name.starts_with(cache_prefix)) continue;
        names_.push_back(tensor.name);
        dtype_ = tensor.dtype;
    }
}

std::size_t KVCache::bytes_of(std::int64_t entries) const {
    return static_cast<std::size_t>(entries * head_dim_) * item_size(dtype_);
}

std::byte* KVCache::address(std::size_t index, int slot) const {
    return addresses_[index] + static_cast<std::size_t>(slot * heads_) * bytes_of(capacity_);
}

void KVCache::copy(std::byte* target, std::size_t target_pitch, const std::byte* source,
                   std::size_t source_pitch, std::size_t size) {
    memory_.copy_rows(target, target_pitch, source, source_pitch, size,
                      static_cast<std::size_t>(heads_));
}

void KVCache::resize(std::int64_t capacity, std::span<const std::int64_t> lengths) {
    const std::size_t pitch_before = bytes_of(capacity_), pitch_after = bytes_of(capacity);
    const std::size_t slot_bytes = static_cast<std::size_t>(heads_) * pitch_after;
    std::vector<std::byte*> resized;
    resized.reserve(names_.size());
    try {
        while (resized.size() < names_.size())
            resized.push_back(memory_.allocate(static_cast<std::size_t>(slots_) * slot_bytes));
    } catch (...) {
        for (std::byte* tensor : resized) memory_.free(tensor);
        throw;
    }
    for (std::size_t i = 0; i < addresses_.size(); ++i) {
        for (std::size_t slot = 0; slot < lengths.size(); ++slot) {
            if (lengths[slot] == 0) continue;
            copy(resized[i] + slot * slot_bytes, pitch_after, address(i, static_cast<int>(slot)),
                 pitch_before, bytes_of(lengths[slot]));
        }
    }
    addresses_.swap(resized);
    capacity_ = capacity;
    for (std::byte* tensor : resized) memory_.free(tensor);  // the former ones
}

void KVCache::copy_slot(int source, int target, std::int64_t length) {
    const std::size_t stride = bytes_of(capacity_);
    for (std::size_t i = 0; i < addresses_.size(); ++i)
        copy(address(i, target), stride, address(i, source), stride, bytes_of(length));
}

std::size_t KVCache::saved_bytes(std::int64_t length) const {
    return names_.size() * static_cast<std::size_t>(heads_) * bytes_of(length);
}

void KVCache::save(int slot, std::int64_t length, std::byte* target) {
    const std::size_t size = bytes_of(length);
    for (std::size_t i = 0; i < addresses_.size(); ++i) {
        copy(target, size, address(i, slot), bytes_of(capacity_), size);
        target += static_cast<std::size_t>(heads_) * size;
    }
}

void KVCache::load(int slot, std::int64_t count, const std::byte* source, std::int64_t length) {
    const std::size_t size = bytes_of(length);
    for (std::size_t i = 0; i < addresses_.size(); ++i) {
        copy(address(i, slot), bytes_of(capacity_), source, size, bytes_of(count));
        source += static_cast<std::size_t>(heads_) * size;
    }
}

}  // namespace pass
