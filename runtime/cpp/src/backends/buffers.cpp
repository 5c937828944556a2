#include "backends/buffers.h"

#include <algorithm>

#include "bundle/noise.h"

namespace pass {

namespace {

constexpr std::int64_t max_items = std::int64_t{1} << 40;  // more than any memory has, and far from overflow

std::int64_t product(const Shape& shape) {
    std::int64_t items = 1;
    for (std::int64_t size : shape) {
        if (size < 0 || __builtin_mul_overflow(items, size, &items) || items > max_items) throw out_of_memory();
    }
    return items;
}

constexpr std::int64_t positions_ahead = 256;  // that are filled beyond those that are needed

}  // namespace

std::byte* Buffers::at(const Binding& binding) {
    const std::size_t item = item_size(binding.dtype);
    if (binding.by_slot) return rows(binding.buffer, Shape(binding.shape.begin() + 1, binding.shape.end()), item);
    std::byte* address = get(binding.buffer, binding.shape, product(binding.shape), item);
    if (binding.constant && filled_.insert(address).second) {
        memory_.upload(address, binding.constant->data(), binding.constant->size());
    }
    return address;
}

std::byte* Buffers::rows(const std::string& name, const Shape& shape, std::size_t item) {
    Shape key{-1};
    key.insert(key.end(), shape.begin(), shape.end());
    return get(name, key, slots_ * product(shape), item);
}

void Buffers::write(const std::string& name, const Shape& shape, const std::vector<std::int64_t>& values) {
    memory_.upload(get(name, shape, product(shape), sizeof(std::int64_t)), values.data(),
                   values.size() * sizeof(std::int64_t));
}

void Buffers::write_part(const std::string& name, int slot, const Shape& shape, std::int64_t first,
                         const std::vector<std::int64_t>& values) {
    const std::size_t size = sizeof(std::int64_t), row = static_cast<std::size_t>(product(shape)) * size;
    const std::size_t before = static_cast<std::size_t>(first) * (row / static_cast<std::size_t>(shape.front()));
    std::byte* address = rows(name, shape, size) + static_cast<std::size_t>(slot) * row + before;
    memory_.upload(address, values.data(), values.size() * size);
}

std::byte* Buffers::get(const std::string& name, const Shape& shape, std::int64_t items, std::size_t item) {
    std::byte*& address = addresses_[{name, shape}];
    if (address == nullptr) {
        const std::size_t size = static_cast<std::size_t>(std::max<std::int64_t>(items, 1)) * item;
        const bool scratch = !shape.empty() && shape.front() == -1 && scratch_.contains(name);
        address = scratch ? shared(name, size) : memory_.allocate(size);
    }
    return address;
}

std::byte* Buffers::shared(const std::string& name, std::size_t size) {
    Block& there = largest_[name];
    if (size > there.size) {
        size = std::max(size, 2 * there.size);
        there = {size, memory_.allocate(size)};
    }
    return there.address;
}

void NoiseRows::begin(int slot, std::optional<std::uint64_t> seed) {
    rows_[static_cast<std::size_t>(slot)] = {seed, 0, 0};
}

void NoiseRows::cover(int slot, std::int64_t first, std::int64_t stop) {
    Row& row = rows_[static_cast<std::size_t>(slot)];
    stop = std::min(stop, positions_);
    if (!row.seed || (row.first <= first && stop <= row.stop)) return;
    row.first = row.stop = 0;  // until every stream is written
    stop = std::min(stop + positions_ahead, positions_);
    std::vector<std::int64_t> offsets(static_cast<std::size_t>(2 * (stop - first)));
    for (std::size_t stream = 0; stream < streams_; ++stream) {
        noise_offsets(*row.seed, static_cast<std::uint32_t>(stream), first, offsets);
        buffers_.write_part(noise_streams[stream], slot, {positions_, 2}, first, offsets);
    }
    row.first = first;
    row.stop = stop;
}

}  // namespace pass
