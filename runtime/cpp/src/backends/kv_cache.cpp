#include "backends/kv_cache.h"

#include "bundle/bindings.h"

namespace pass {

KVCache::KVCache(Memory& memory, const Manifest& manifest, int slots, std::int64_t spare_entries)
    : memory_(memory),
      slots_(slots),
      heads_(manifest.model.kv_heads),
      head_dim_(manifest.model.head_dim),
      spare_(spare_entries) {
    for (const Tensor& tensor : manifest.trunk.inputs) {
        if (!tensor.name.starts_with(cache_prefix)) continue;
        names_.push_back(tensor.name);
        dtype_ = tensor.dtype;
    }
}

std::size_t KVCache::entry_bytes() const {
    return static_cast<std::size_t>(head_dim_) * item_size(dtype_);
}

std::size_t KVCache::pitch(std::int64_t capacity) const {
    return static_cast<std::size_t>(capacity + spare_) * entry_bytes();
}

std::byte* KVCache::place(std::size_t index, int slot) const {
    return addresses_[index] + static_cast<std::size_t>(slot * heads_) * pitch(capacity_);
}

void KVCache::resize(std::int64_t capacity, std::span<const std::int64_t> lengths) {
    const auto heads = static_cast<std::size_t>(heads_);
    const std::size_t old = pitch(capacity_), fresh = pitch(capacity);
    std::vector<std::byte*> grown;
    grown.reserve(names_.size());
    try {
        while (grown.size() < names_.size())
            grown.push_back(memory_.allocate(static_cast<std::size_t>(slots_) * heads * fresh));
    } catch (...) {
        for (std::byte* address : grown) memory_.free(address);
        throw;
    }
    for (std::size_t i = 0; i < addresses_.size(); ++i) {
        for (std::size_t slot = 0; slot < lengths.size(); ++slot) {
            const std::size_t size = static_cast<std::size_t>(lengths[slot]) * entry_bytes();
            if (size == 0) continue;
            memory_.copy_rows(grown[i] + slot * heads * fresh, fresh,
                              addresses_[i] + slot * heads * old, old, size, heads);
        }
    }
    addresses_.swap(grown);
    capacity_ = capacity;
    for (std::byte* address : grown) memory_.free(address);
}

void KVCache::keep_rows(int slot, std::int64_t length, std::span<const std::int64_t> rows) {
    const std::size_t stride = pitch(capacity_), size = entry_bytes();
    for (std::size_t entry = 0; entry < rows.size(); ++entry) {
        const auto row = static_cast<std::size_t>(rows[entry]);
        if (row == entry) continue;  // always, in a chain
        const std::size_t before = static_cast<std::size_t>(length) * size;
        for (std::size_t i = 0; i < addresses_.size(); ++i) {
            std::byte* first = place(i, slot) + before;
            memory_.copy_rows(first + entry * size, stride, first + row * size, stride, size,
                              static_cast<std::size_t>(heads_));
        }
    }
}

void KVCache::move(int source, int target, std::int64_t length) {
    const std::size_t stride = pitch(capacity_);
    const std::size_t size = static_cast<std::size_t>(length) * entry_bytes();
    for (std::size_t i = 0; i < addresses_.size(); ++i) {
        memory_.copy_rows(place(i, target), stride, place(i, source), stride, size,
                          static_cast<std::size_t>(heads_));
    }
}

std::size_t KVCache::saved_bytes(std::int64_t length) const {
    return names_.size() * static_cast<std::size_t>(heads_ * length) * entry_bytes();
}

void KVCache::save(int slot, std::int64_t length, std::byte* address) {
    const std::size_t stride = pitch(capacity_),
                      size = static_cast<std::size_t>(length) * entry_bytes();
    const auto heads = static_cast<std::size_t>(heads_);
    for (std::size_t i = 0; i < addresses_.size(); ++i)
        memory_.copy_rows(address + i * heads * size, size, place(i, slot), stride, size, heads);
}

void KVCache::load(int slot, std::int64_t count, const std::byte* address, std::int64_t length) {
    const std::size_t stride = pitch(capacity_),
                      size = static_cast<std::size_t>(length) * entry_bytes();
    const auto heads = static_cast<std::size_t>(heads_);
    for (std::size_t i = 0; i < addresses_.size(); ++i) {
        memory_.copy_rows(place(i, slot), stride, address + i * heads * size, size,
                          static_cast<std::size_t>(count) * entry_bytes(), heads);
    }
}

}  // namespace pass
