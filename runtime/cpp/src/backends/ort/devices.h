// The devices on which ONNX Runtime runs graphs: their execution providers and their memory.
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
    const char* name;      // as in LoadOptions::device, without a number
    const char* provider;  // the name of its execution provider
    const char* memory;    // ONNX Runtime's name of the memory for tensors
    bool plugin;           // whether the provider is in its own library, which must be registered
    // Options of the provider: if a session cannot be opened with the first, the next are tried.
    std::vector<ProviderOptions> options;
    int ordinal = 0;  // the GPU's number

    bool on_cpu() const { return memory == std::string_view("Cpu"); }
    // Whether sessions with options[index] capture CUDA graphs.
    bool captures(std::size_t index = 0) const;
};

// The device of that name. `auto` is CUDA if this ONNX Runtime has it and there is a GPU, else the
// CPU. Throws Error if this ONNX Runtime has no provider for the device.
Device choose_device(const OrtLibrary& library, const std::string& name);

// Register the plugin of `device`, if it is one. Throws Error if that fails.
void register_plugin(const OrtLibrary& library, const Device& device, const LoadOptions& options);

// Add the provider of `device` to `session_options`, unless it is the CPU's, which is always there.
void append_provider(const OrtLibrary& library, OrtSessionOptions* session_options,
                     const Device& device, const ProviderOptions& provider_options);

// The memory of `device`. allocator: see LoadOptions; only for the CPU.
std::unique_ptr<Memory> open_memory(const Device& device, std::shared_ptr<Allocator> allocator);

}  // namespace pass
