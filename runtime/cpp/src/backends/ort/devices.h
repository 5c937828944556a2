// The execution provider and the memory of every device.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/memory.h"
#include "backends/ort/library.h"
#include "pass/options.hpp"

namespace pass {

using ProviderOptions = std::vector<std::pair<const char*, const char*>>;

struct Device {
    const char* name;
    const char* provider;
    const char* memory;  // ONNX Runtime's name of the memory for tensors
    bool plugin;         // whether the provider is in its own library, which must be registered
    std::vector<ProviderOptions> options;  // to try one after the other
    int ordinal = 0;                       // the GPU's number

    bool on_cpu() const { return memory == std::string_view("Cpu"); }
    // Whether sessions with options[index] capture CUDA graphs.
    bool captures(std::size_t index = 0) const;
};

// The device to use; `auto` is CUDA if this ONNX Runtime has it and there is a GPU, else the CPU.
// Throws Error without its provider.
Device choose_device(const OrtLibrary& library, const std::string& name);

// Register the plugin of `device`, if it has one. Throws Error if it cannot be registered.
void register_plugin(const OrtLibrary& library, const Device& device, const LoadOptions& options);

// Make sessions of `session_options` run on `device`, with `provider_options`.
void append_provider(const OrtLibrary& library, OrtSessionOptions* session_options,
                     const Device& device, const ProviderOptions& provider_options);

// The memory that sessions on `device` work in. allocator: of CPU memory.
std::unique_ptr<Memory> open_memory(const Device& device, std::shared_ptr<Allocator> allocator);

}  // namespace pass
