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
    // Options of the provider: if a session cannot be opened with the first, the next are tried.
    std::vector<ProviderOptions> options;
    int ordinal = 0;  // the GPU's number

    bool on_cpu() const { return memory == std::string_view("Cpu"); }
    // Whether sessions with options[index] capture CUDA graphs.
    bool captures(std::size_t index = 0) const;
};

// `auto` is CUDA if this ONNX Runtime has it and there is a GPU, else the CPU. Throws Error if this
// ONNX Runtime has no provider for the device.
Device choose_device(const OrtLibrary& library, const std::string& name);

// Add the provider of `device`, unless it is the CPU's, which is always there.
void append_provider(const OrtLibrary& library, OrtSessionOptions* session_options,
                     const Device& device, const ProviderOptions& provider_options);

// allocator: for the CPU.
std::unique_ptr<Memory> open_memory(const Device& device, std::shared_ptr<Allocator> allocator);

}  // namespace pass
