// The devices on which ONNX Runtime runs graphs.
#pragma once

#include <string>

#include "backends/ort/library.h"

namespace pass {

struct Device {
    bool is_gpu = false;  // runs CUDAExecutionProvider
    int ordinal = 0;      // the GPU's number

    const char* name() const { return is_gpu ? "cuda" : "cpu"; }
    // ONNX Runtime's name of the memory for tensors.
    const char* memory() const { return is_gpu ? "Cuda" : "Cpu"; }
};

// `auto` is CUDA if this ONNX Runtime has it and there is a GPU, else the CPU. Throws Error if this
// ONNX Runtime has no CUDA for the device.
Device choose_device(const OrtLibrary& library, const std::string& name);

// capture: whether sessions capture CUDA graphs.
void add_cuda(const OrtLibrary& library, OrtSessionOptions* session_options, int ordinal,
              bool capture);

}  // namespace pass
