// Execution providers as data: what a device name means to ONNX Runtime, and its memory.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "memory.h"
#include "ort_library.h"
#include "pass/options.hpp"

namespace pass {

using ProviderOptions = std::vector<std::pair<const char*, const char*>>;

struct Device {
    const char* name;
    const char* provider;
    const char* memory;                    // ONNX Runtime's name for where its tensors are
    bool plugin;                           // in a library of its own, which is registered first
    std::vector<ProviderOptions> options;  // tried in this order
};

// cpu, cuda or tensorrt-rtx-ep; auto is CUDA where this ONNX Runtime has it, else the CPU. Throws Error where it has no
// such provider.
const Device& choose_device(const OrtLibrary& library, const std::string& name);

// Make the plugin of `device` known, where it has one. Throws Error where it cannot be.
void register_plugin(const OrtLibrary& library, const Device& device, const LoadOptions& options);

// Run what `session_options` open on `device`, with the provider options `attempt`.
void append_provider(const OrtLibrary& library, OrtSessionOptions* session_options, const Device& device,
                     const ProviderOptions& attempt);

std::unique_ptr<Memory> open_memory(const Device& device, std::shared_ptr<Allocator> allocator);

}  // namespace pass
