#include "backends/buffers.h"

#include <algorithm>

#include "bundle/noise.h"

namespace pass {

namespace {

constexpr std::int64_t max_elements = std::int64_t{1} << 40;  // more than any memory holds
constexpr std::int64_t noise_ahead_positions = 256;  // filled beyond those of the next pass

// The number of elements of a tensor. Throws Error if no memory can hold them.
std::int64_t product(const Shape& shape) {
    std::int64_t elements = 1;
    for (std::int64_t size : shape) {
        if (size < 0 || __builtin_mul_overflow(elements, size, &elements) ||
            elements > max_elements) {
            throw out_of_memory();
        }
    }
    return elements;
}

}  // namespace

std::byte* Buffers::address_of(const Binding& binding) {
    const std::size_t item = item_size(binding.dtype);
    if (binding.by_slot) {
        const Shape row(binding.shape.begin() + 1, binding.shape.end());
        return rows_address(binding.buffer, row, item);
    }
    std::byte* buffer = address(binding.buffer, binding.shape, product(binding.shape), item);
    if (binding.constant && filled_.insert(buffer).second)
        memory_.upload(buffer, binding.constant->data(), binding.constant->size());
    return buffer;
}

std::byte* Buffers::rows_address(const std::string& name, const Shape& shape,
                                 std::size_t item_size) {
    Shape key{-1};
    key.insert(key.end(), shape.begin(), shape.end());
    return address(name, key, slots_ * product(shape), item_size);
}

void Buffers::write(const std::string& name, const Shape& shape,
                    const std::vector<std::int64_t>& values) {
    memory_.upload(address(name, shape, product(shape), sizeof(std::int64_t)), values.data(),
                   values.size() * sizeof(std::int64_t));
}

void Buffers::write_part(const std::string& name, int slot, const Shape& shape, std::int64_t first,
                         const std::vector<std::int64_t>& values) {
    const std::int64_t items_before = slot * shape.front() + first;
    const auto offset = static_cast<std::size_t>(items_before * (product(shape) / shape.front()));
    std::byte* rows = rows_address(name, shape, sizeof(std::int64_t));
    memory_.upload(rows + offset * sizeof(std::int64_t), values.data(),
                   values.size() * sizeof(std::int64_t));
}

std::byte* Buffers::address(const std::string& name, const Shape& key, std::int64_t elements,
                            std::size_t item_size) {
    std::byte*& buffer = addresses_[{name, key}];
    if (buffer == nullptr) {
        const std::size_t size =
            static_cast<std::size_t>(std::max<std::int64_t>(elements, 1)) * item_size;
        const bool transient = !key.empty() && key.front() == -1 && transient_.contains(name);
        buffer = transient ? transient_address(name, size) : memory_.allocate(size);
    }
    return buffer;
}

std::byte* Buffers::transient_address(const std::string& name, std::size_t size) {
    Block& newest = newest_blocks_[name];
    if (size > newest.size) {
        size = std::max(size, 2 * newest.size);
        newest = {size, memory_.allocate(size)};
    }
    return newest.address;
}

void NoiseRows::begin(int slot, std::optional<std::uint64_t> seed) {
    rows_[static_cast<std::size_t>(slot)] = {seed, 0, 0};
}

void NoiseRows::cover(int slot, std::int64_t first, std::int64_t stop) {
    Row& row = rows_[static_cast<std::size_t>(slot)];
    stop = std::min(stop, positions_);
    if (!row.seed || (row.first <= first && stop <= row.stop)) return;
    row.first = row.stop = 0;  // If a write fails, nothing counts as filled.
    stop = std::min(stop + noise_ahead_positions, positions_);
    std::vector<std::int64_t> offsets(static_cast<std::size_t>(2 * (stop - first)));
    for (std::size_t stream = 0; stream < streams_; ++stream) {
        noise_offsets(*row.seed, static_cast<std::uint32_t>(stream), first, offsets);
        buffers_.write_part(noise_streams[stream], slot, {positions_, 2}, first, offsets);
    }
    row.first = first;
    row.stop = stop;
}

}  // namespace pass
