// What the backend calls of TensorRT. nvinfer.cpp implements it; tests have a fake.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "backends/buffers.h"

namespace pass {

// An execution context. Functions but `capturable` return false if TensorRT reports an error.
class TrtContext {
   public:
    virtual ~TrtContext() = default;
    virtual void set_scratch(std::byte* address, std::int64_t size) = 0;
    virtual bool set_profile(int index, void* stream) = 0;
    virtual bool set_shape(const std::string& input, const Shape& shape) = 0;
    virtual bool set_address(const std::string& tensor, std::byte* address) = 0;
    // Whether a CUDA graph can contain the next run. Always true for TensorRT.
    virtual bool capturable(void* stream) = 0;
    virtual bool enqueue(void* stream) = 0;
};

// A deserialized engine. Its contexts must be destroyed before it.
class TrtCudaEngine {
   public:
    virtual ~TrtCudaEngine() = default;
    virtual std::int64_t scratch_size() const = 0;  // bytes that a context needs for activations
    virtual int profiles() const = 0;
    // The shapes of all inputs and outputs, by name; dynamic sizes are -1.
    virtual std::map<std::string, Shape> shapes() const = 0;
    // Output -> the input whose memory it shares; none with headers before TensorRT 10.15.
    virtual std::optional<std::map<std::string, std::string>> aliases() const = 0;
    // A context without scratch memory, which the caller sets; null if memory runs out.
    virtual std::unique_ptr<TrtContext> create_context() = 0;
};

// The library with a TensorRT runtime. It must outlive its engines.
class TrtApi {
   public:
    virtual ~TrtApi() = default;
    // The version in the form that `pass-export build` writes: "10.15.1.29".
    virtual std::string version() const = 0;
    // Null if these bytes are no engine for this library and this GPU.
    virtual std::unique_ptr<TrtCudaEngine> deserialize(std::span<const std::byte> engine) = 0;
    // The library's last errors since the last call, in one line; empty if there were none.
    virtual std::string take_errors() = 0;
    // Use `file` as a cache of kernels that are compiled while engines run; `save_kernels` writes
    // it for the next process. Does nothing for TensorRT, which compiles none.
    virtual void use_kernels(const std::filesystem::path& file) = 0;
    virtual void save_kernels() = 0;
};

}  // namespace pass
