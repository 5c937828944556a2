// TensorRT as far as the backend calls it. trt_nvinfer.cpp is this over NVIDIA's headers; tests have a fake.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "buffers.h"

namespace pass {

// An execution context. Functions return false where TensorRT refuses.
class TrtContext {
   public:
    virtual ~TrtContext() = default;
    virtual void set_scratch(std::byte* address, std::int64_t size) = 0;
    virtual bool set_profile(int index, void* stream) = 0;
    virtual bool set_shape(const std::string& input, const Shape& shape) = 0;
    virtual bool set_address(const std::string& tensor, std::byte* address) = 0;
    // Whether a CUDA graph can hold its next run. (TensorRT-RTX says so; TensorRT always can with these operators.)
    virtual bool capturable(void* stream) = 0;
    virtual bool enqueue(void* stream) = 0;
};

// A deserialized engine. Its contexts go first.
class TrtPlan {
   public:
    virtual ~TrtPlan() = default;
    virtual std::int64_t scratch_size() const = 0;
    virtual int profiles() const = 0;
    // Output -> the input whose memory it shares; none where the headers are too old to ask (before TensorRT 10.15).
    virtual std::optional<std::map<std::string, std::string>> aliases() const = 0;
    // With scratch memory of the caller's; null where there is no memory.
    virtual std::unique_ptr<TrtContext> create_context() = 0;
};

// The library, with a runtime of its own. It outlives its plans.
class TrtApi {
   public:
    virtual ~TrtApi() = default;
    // As `pass-export build` notes it: "10.15.1.29".
    virtual std::string version() const = 0;
    // Null where the file is no engine of this library and this GPU.
    virtual std::unique_ptr<TrtPlan> deserialize(std::span<const std::byte> engine) = 0;
};

}  // namespace pass
