#include "backends/memory.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace pass {

namespace {

constexpr std::size_t alignment_bytes = 64;  // a CPU's cache line, which suits vector instructions

}  // namespace

Error out_of_memory(std::optional<std::size_t> size) {
    char amount[64] = "";
    if (size)
        std::snprintf(amount, sizeof amount, " for %.1f MiB more",
                      static_cast<double>(*size) / (1 << 20));
    return Error("there is no memory" + std::string(amount) +
                 ": use fewer slots (--max-batch-size), a smaller --capacity, or shorter prompts");
}

std::byte* HostMemory::allocate(std::size_t size) {
    const std::size_t padded = size + alignment_bytes;
    // calloc, and no memset, because the system provides its pages only when they are written.
    void* memory = allocator_ ? allocator_->allocate(padded) : std::calloc(padded, 1);
    if (memory == nullptr) throw out_of_memory(size);
    std::shared_ptr<void> block(memory, [allocator = allocator_](void* freed) {
        allocator ? allocator->free(freed) : std::free(freed);
    });
    if (allocator_) std::memset(memory, 0, padded);
    const std::size_t offset = reinterpret_cast<std::uintptr_t>(memory) % alignment_bytes;
    std::byte* address =
        static_cast<std::byte*>(memory) + (offset == 0 ? 0 : alignment_bytes - offset);
    blocks_.emplace(address, std::move(block));
    return address;
}

void HostMemory::upload(std::byte* address, const void* host, std::size_t size) {
    if (size != 0) std::memcpy(address, host, size);
}

void HostMemory::download(void* host, const std::byte* address, std::size_t size) {
    if (size != 0) std::memcpy(host, address, size);
}

void HostMemory::copy_rows(std::byte* target, std::size_t pitch, const std::byte* source,
                           std::size_t source_pitch, std::size_t size, std::size_t rows) {
    for (std::size_t row = 0; row < rows; ++row)
        std::memcpy(target + row * pitch, source + row * source_pitch, size);
}

std::size_t item_size(const std::string& dtype) {
    if (dtype == "int64") return 8;
    if (dtype == "float32" || dtype == "int32") return 4;
    return dtype == "bool" ? 1 : 2;  // 2: float16 and bfloat16
}

}  // namespace pass
