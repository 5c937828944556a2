// Execution providers as data: the provider and the memory of a device name.
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
    const char* memory;                    // ONNX Runtime's name for where its tensors are
    bool plugin;                           // it is in a library of its own, which must be registered first
    std::vector<ProviderOptions> options;  // tried in this order
    int ordinal = 0;                       // which of several GPUs

    bool on_cpu() const { return memory == std::string_view("Cpu"); }
    // Whether sessions with the options number `attempt` capture CUDA graphs.
    bool captures(std::size_t attempt = 0) const;
};

// name: cpu, cuda, cuda:1 and so on, tensorrt-rtx-ep, or auto, which is cuda if this ONNX Runtime has it, else cpu.
// Throws Error if ONNX Runtime has no such provider.
Device choose_device(const OrtLibrary& library, const std::string& name);

// Register the plugin of `device`, if it has one. Throws Error if it cannot be registered.
void register_plugin(const OrtLibrary& library, const Device& device, const LoadOptions& options);

// Make sessions of `session_options` run on `device`, with the provider options `attempt`.
void append_provider(const OrtLibrary& library, OrtSessionOptions* session_options, const Device& device,
                     const ProviderOptions& attempt);

std::unique_ptr<Memory> open_memory(const Device& device, std::shared_ptr<Allocator> allocator);

}  // namespace pass
