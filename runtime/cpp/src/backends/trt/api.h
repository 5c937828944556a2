// The part of TensorRT that the backend calls. nvinfer.cpp implements it; tests have a fake.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "backends/buffers.h"

namespace pass {

// An execution context. Methods return false if TensorRT reports an error.
class TrtContext {
   public:
    virtual ~TrtContext() = default;
    // Give the context `size` bytes for activations.
    virtual void set_scratch(std::byte* address, std::int64_t size) = 0;
    virtual bool set_profile(int index, void* stream) = 0;
    virtual bool set_shape(const std::string& input, const Shape& shape) = 0;
    virtual bool set_address(const std::string& tensor, std::byte* address) = 0;
    // Put one run on the stream.
    virtual bool enqueue(void* stream) = 0;
};

// A deserialized engine. Its contexts must be destroyed before it.
class TrtCudaEngine {
   public:
    virtual ~TrtCudaEngine() = default;
    virtual std::int64_t scratch_size() const = 0;  // bytes that a context needs for activations
    // A context, which needs `set_scratch`; null if memory runs out.
    virtual std::unique_ptr<TrtContext> create_context() = 0;
};

// TensorRT's library. It must outlive its engines.
class TrtApi {
   public:
    virtual ~TrtApi() = default;
    // The version in the form that `pass-export build` writes: "10.15.1.29".
    virtual std::string version() const = 0;
    // Null if `content` is no engine for this library and this GPU.
    virtual std::unique_ptr<TrtCudaEngine> deserialize(std::span<const std::byte> content) = 0;
    // The last errors that the library reported since the last call, in one line.
    virtual std::string take_errors() = 0;
};

}  // namespace pass
