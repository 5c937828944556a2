// A call of an operator: its inputs, outputs, attributes, memory and threads.
#pragma once
#include <cstdlib>

#include "kernels.h"
#include "ort.h"

namespace {

using namespace pass;

ort::Api api;

template <class Function>
Function* entry(ort::Entry place) {
    return reinterpret_cast<Function*>(const_cast<void*>(api[place]));
}

// Calls a function that returns a status. The arguments have exactly the types of its parameters.
template <class... Arguments>
ort::Status* status_of(ort::Entry place, Arguments... arguments) {
    return entry<ort::Status*(Arguments...)>(place)(arguments...);
}

ort::Status* refuse(const char* message) {
    constexpr int INVALID_ARGUMENT = 2;
    return status_of(ort::CreateStatus, INVALID_ARGUMENT, message);
}

// Memory of a thread that grows and is used again by the next operator.
class Scratch {
   public:
    ~Scratch() { free(memory_); }
    void begin(size_t bytes) {
        used_ = 0;
        if (bytes <= size_) return;
        free(memory_);
        memory_ = static_cast<char*>(aligned_alloc(64, (bytes + 63) / 64 * 64));
        if (memory_ == nullptr) abort();
        size_ = bytes;
    }
    template <class T>
    T* take(size_t count) {
        T* result = reinterpret_cast<T*>(memory_ + used_);
        used_ += bytes<T>(count);
        return result;
    }
    template <class T>
    static size_t bytes(size_t count) {
        return (count * sizeof(T) + 63) / 64 * 64;
    }

   private:
    char* memory_ = nullptr;
    size_t size_ = 0, used_ = 0;
};

// Of the thread that runs the operator, and of a thread that runs a part of it.
thread_local Scratch scratch, part_scratch;

struct Shape {
    int64_t size[8];
    size_t rank = 0;

    int64_t last() const { return rank ? size[rank - 1] : 1; }
    int64_t rows() const {
        int64_t count = 1;
        for (size_t i = 0; i + 1 < rank; i++) count *= size[i];
        return count;
    }
    int64_t count() const { return rows() * last(); }
};

struct Tensor {
    const void* data = nullptr;  // null if the input is left out
    Shape shape;

    explicit operator bool() const { return data != nullptr; }
    const float* floats() const { return static_cast<const float*>(data); }
    const int64_t* ints() const { return static_cast<const int64_t*>(data); }
    const uint8_t* bytes() const { return static_cast<const uint8_t*>(data); }
    const bool* bools() const { return static_cast<const bool*>(data); }
};

class Call {
   public:
    explicit Call(ort::Context* context) : context_(context) {}

    Tensor input(size_t index) const {
        const ort::Value* value = nullptr;
        status_of(ort::KernelContext_GetInput, context_, index, &value);
        Tensor tensor;
        if (value == nullptr) return tensor;
        ort::ShapeInfo* info = nullptr;
        status_of(ort::GetTensorTypeAndShape, value, &info);
        status_of(ort::GetDimensionsCount, info, &tensor.shape.rank);
        if (tensor.shape.rank > 8) tensor.shape.rank = 8;
        status_of(ort::GetDimensions, info, &tensor.shape.size[0], tensor.shape.rank);
        entry<void(ort::ShapeInfo*)>(ort::ReleaseTensorTypeAndShapeInfo)(info);
        tensor.data = memory(const_cast<ort::Value*>(value));
        static const char nothing = 0;  // a tensor without elements may have no memory
        if (tensor.data == nullptr) tensor.data = &nothing;
        return tensor;
    }

    // Null if nobody reads the output.
    float* output(size_t index, const Shape& shape) const {
        ort::Value* value = nullptr;
        status_of(ort::KernelContext_GetOutput, context_, index, &shape.size[0], shape.rank, &value);
        return value == nullptr ? nullptr : static_cast<float*>(memory(value));
    }

    // Calls task(i) for i < count, perhaps in several threads.
    template <class Task>
    void parallel(size_t count, const Task& task) const {
        if (count == 1) {
            task(0);
            return;
        }
        void (*run)(void*, size_t) = [](void* data, size_t i) {
            (*static_cast<const Task*>(data))(i);
        };
        const size_t most_parts = count < 32 ? count : 32;
        void* data = const_cast<Task*>(&task);
        status_of(ort::KernelContext_ParallelFor, context_, run, count, most_parts, data);
    }

   private:
    static void* memory(ort::Value* value) {
        void* data = nullptr;
        status_of(ort::GetTensorMutableData, value, &data);
        return data;
    }

    ort::Context* context_;
};

class Attributes {
   public:
    explicit Attributes(const ort::Info* info) : info_(info) {}

    int64_t number(const char* name, int64_t missing) const {
        return value(ort::KernelInfoGetAttribute_int64, name, missing);
    }
    float real(const char* name, float missing) const {
        return value(ort::KernelInfoGetAttribute_float, name, missing);
    }

   private:
    template <class T>
    T value(ort::Entry read, const char* name, T missing) const {
        T value = missing;
        ort::Status* status = status_of(read, info_, name, &value);
        if (status == nullptr) return value;
        entry<void(ort::Status*)>(ort::ReleaseStatus)(status);
        return missing;
    }

    const ort::Info* info_;
};

// Calls task(first, last) for parts of 0 .. count-1 of about `grain` units each. The number of parts
// is a multiple of 4, so that 2 or 4 threads get equal shares.
template <class Task>
void split(const Call& call, size_t count, size_t grain, const Task& task) {
    size_t parts = count / (grain ? grain : 1);
    parts = parts < 2 ? 1 : parts > 28 ? 32 : (parts + 3) / 4 * 4;
    if (parts > count) parts = count ? count : 1;
    call.parallel(parts, [&](size_t i) { task(count * i / parts, count * (i + 1) / parts); });
}

}  // namespace
