// The part of CUDA that the backends use. Its library is opened when a GPU is needed.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <unordered_set>

#include "backends/memory.h"

namespace pass {

// The functions of the CUDA runtime: a name, CUDA's name, and the type. They return error codes.
#define PASS_CUDA_FUNCTIONS(FUNCTION)                                                            \
    FUNCTION(driver_version, cudaDriverGetVersion, int(int*)) /* 13040 for 13.4 */               \
    FUNCTION(runtime_version, cudaRuntimeGetVersion, int(int*))                                  \
    FUNCTION(device_count, cudaGetDeviceCount, int(int*))                                        \
    FUNCTION(get_device, cudaGetDevice, int(int*))                                               \
    FUNCTION(set_device, cudaSetDevice, int(int)) /* of the calling thread */                    \
    FUNCTION(device_attribute, cudaDeviceGetAttribute,                                           \
             int(int*, int, int)) /* value, attribute, device */                                 \
    FUNCTION(memory_info, cudaMemGetInfo, int(std::size_t*, std::size_t*)) /* free, total */     \
    FUNCTION(malloc, cudaMalloc, int(void**, std::size_t))                                       \
    FUNCTION(free, cudaFree, int(void*))                                                         \
    FUNCTION(malloc_host, cudaMallocHost, int(void**, std::size_t))                              \
    FUNCTION(free_host, cudaFreeHost, int(void*))                                                \
    FUNCTION(memset_async, cudaMemsetAsync, int(void*, int, std::size_t, void*))                 \
    FUNCTION(memcpy_async, cudaMemcpyAsync, int(void*, const void*, std::size_t, int, void*))    \
    FUNCTION(                                                                                    \
        memcpy_2d_async, cudaMemcpy2DAsync,                                                      \
        int(void*, std::size_t, const void*, std::size_t, std::size_t, std::size_t, int, void*)) \
    FUNCTION(stream_create, cudaStreamCreateWithFlags, int(void**, unsigned))                    \
    FUNCTION(stream_destroy, cudaStreamDestroy, int(void*))                                      \
    FUNCTION(stream_synchronize, cudaStreamSynchronize, int(void*))                              \
    FUNCTION(begin_capture, cudaStreamBeginCapture, int(void*, int))                             \
    FUNCTION(end_capture, cudaStreamEndCapture, int(void*, void**))                              \
    FUNCTION(graph_instantiate, cudaGraphInstantiate, int(void**, void*, unsigned long long))    \
    FUNCTION(graph_destroy, cudaGraphDestroy, int(void*))                                        \
    FUNCTION(graph_exec_destroy, cudaGraphExecDestroy, int(void*))                               \
    FUNCTION(graph_launch, cudaGraphLaunch, int(void*, void*))                                   \
    FUNCTION(last_error, cudaGetLastError, int()) /* clears CUDA's record of it */               \
    FUNCTION(error_string, cudaGetErrorString, const char*(int))

// Tests have a fake.
struct CudaApi {
#define PASS_MEMBER(member, name, ...) std::function<__VA_ARGS__> member;
    PASS_CUDA_FUNCTIONS(PASS_MEMBER)
#undef PASS_MEMBER
    std::function<int(void*, int)> device_properties;  // cudaDeviceProp, which begins with a name

    // Opens $PASS_CUDART, or the newest libcudart that is found. Throws Error if there is none.
    static CudaApi open();
    // Of an error after which CUDA works no more for this process; null for other codes.
    static const char* device_lost_name(int code);
    // name: the function that returned `code`. Throws Error, or DeviceLost if the device is lost.
    void check(int code, const char* name) const;
    // For a driver older than the library.
    std::string driver_hint() const;
    // Throws Error if the process sees no such GPU.
    void require_gpu(int ordinal) const;
};

struct Gpu {
    std::string name;
    std::string target;  // its compute capability, such as `sm89`
};

// None if it cannot be used. Throws Error if `ordinal` is not 0 and no GPU has it.
std::optional<Gpu> find_gpu(const CudaApi& api, int ordinal);
// What is missing or too old, and what to do.
std::string why_no_gpu(const CudaApi& api);

// The memory of one device, with one stream and the graphs captured on it. A thread must hold the
// result of `for_this_thread` while it calls other methods.
//
// staging_bytes: of the pinned host memory through which copies go. Uploads that fit return at
// once, and only later work on this stream is sure to see them; so it is 0 if other streams read
// them.
class Cuda : public Memory {
   public:
    // Throws Error if there is no such GPU.
    Cuda(CudaApi api, int ordinal, std::size_t staging_bytes = 0);
    ~Cuda() override;
    Cuda(const Cuda&) = delete;
    Cuda& operator=(const Cuda&) = delete;

    std::byte* allocate(std::size_t size) override;
    void free(std::byte* address) override;
    void upload(std::byte* address, const void* host, std::size_t size) override;
    void download(void* host, const std::byte* address, std::size_t size) override;
    void copy_rows(std::byte* target, std::size_t pitch, const std::byte* source,
                   std::size_t source_pitch, std::size_t size, std::size_t rows) override;

    std::exception_ptr failure() const override { return failure_; }
    void check_device() const override;
    std::shared_ptr<void> for_this_thread() override;

    void* stream() const { return stream_; }
    // Host memory into which the device can copy directly.
    std::byte* pinned(std::size_t size);
    // `synchronize` waits for it. In a capture, pin `host`.
    void enqueue_download(void* host, const std::byte* address, std::size_t size);
    // Wait until the device has done all that is on the stream.
    void synchronize();
    // A graph of what `enqueue` puts on the stream. Throws Error if it cannot be captured; later
    // calls work nevertheless.
    void* capture(const std::function<void()>& enqueue);
    void launch(void* graph) { check(api_.graph_launch(graph, stream_), "cudaGraphLaunch"); }
    // Clears the CUDA error after which an engine failed, and returns it. Throws DeviceLost.
    std::string why() const;

   private:
    // As CudaApi::check. Keeps the first DeviceLost, and clears CUDA's record of any other error,
    // which engines would take for that of a later launch.
    void check(int code, const char* name) const;
    // Staging memory that no copy uses; null if it has fewer bytes.
    std::byte* stage(std::size_t size);

    CudaApi api_;
    int ordinal_;
    mutable std::exception_ptr failure_;
    void* stream_ = nullptr;
    bool capturing_ = false;
    std::size_t staging_bytes_;
    std::byte* staging_ = nullptr;     // allocated when it is first used
    std::size_t in_flight_bytes_ = 0;  // from its start: copies may still use them
    std::unordered_set<void*> blocks_, host_blocks_, graphs_;
};

}  // namespace pass
