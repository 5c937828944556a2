#include "buffers.h"

#include <algorithm>

namespace pass {

namespace {

std::int64_t product(const Shape& shape) {
    std::int64_t items = 1;
    for (std::int64_t size : shape) items *= size;
    return items;
}

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

std::byte* Buffers::get(const std::string& name, const Shape& shape, std::int64_t items, std::size_t item) {
    std::byte*& address = addresses_[{name, shape}];
    if (address == nullptr)
        address = memory_.allocate(static_cast<std::size_t>(std::max<std::int64_t>(items, 1)) * item);
    return address;
}

}  // namespace pass
