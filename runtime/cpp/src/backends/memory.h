// The memory of the host, or of a GPU (cuda.h). Blocks never move, as graphs contain addresses.
#pragma once

#include <cstddef>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "errors.h"
#include "pass/options.hpp"

namespace pass {

// What buffers need of a device. Work that begins after a method has returned sees its effect.
class Memory {
   public:
    virtual ~Memory() = default;
    // Zeroed bytes. Throws Error if memory has run out.
    virtual std::byte* allocate(std::size_t size) = 0;
    // The DeviceLost that was thrown first; null while the device works.
    virtual std::exception_ptr failure() const { return nullptr; }
    // The device is current for the calling thread as long as the result lives.
    virtual std::shared_ptr<void> for_this_thread() { return nullptr; }
    // Throws DeviceLost if the device is lost. Call it after work that failed without a reason.
    virtual void check_device() const {}
    virtual void free(std::byte* address) = 0;
    // The host's bytes may change afterwards.
    virtual void upload(std::byte* address, const void* host, std::size_t size) = 0;
    // After all earlier work of the device.
    virtual void download(void* host, const std::byte* address, std::size_t size) = 0;
    // Copy rows of `size` bytes, from `source_pitch` bytes apart to `pitch` bytes apart.
    virtual void copy_rows(std::byte* target, std::size_t pitch, const std::byte* source,
                           std::size_t source_pitch, std::size_t size, std::size_t rows) = 0;
};

// The error to throw if an allocation failed.
Error out_of_memory(std::optional<std::size_t> size = std::nullopt);

// allocator: null is the heap.
class HostMemory : public Memory {
   public:
    explicit HostMemory(std::shared_ptr<Allocator> allocator) : allocator_(std::move(allocator)) {}

    std::byte* allocate(std::size_t size) override;
    void free(std::byte* address) override { blocks_.erase(address); }
    void upload(std::byte* address, const void* host, std::size_t size) override;
    void download(void* host, const std::byte* address, std::size_t size) override;
    void copy_rows(std::byte* target, std::size_t pitch, const std::byte* source,
                   std::size_t source_pitch, std::size_t size, std::size_t rows) override;

   private:
    std::shared_ptr<Allocator> allocator_;
    // By the aligned address that `allocate` returned.
    std::unordered_map<std::byte*, std::shared_ptr<void>> blocks_;
};

// In bytes.
std::size_t item_size(const std::string& dtype);

}  // namespace pass
