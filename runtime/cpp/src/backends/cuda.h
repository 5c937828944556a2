// The CUDA runtime library, opened when a GPU is needed, and the memory of a GPU with one stream
// and the graphs captured on it.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <unordered_set>

#include "backends/memory.h"

namespace pass {

// The library's functions that are used here; tests have a fake. An int result is an error code.
struct CudaApi {
    std::function<int(int*)> driver_version, runtime_version;  // 13040 is 13.4; 0: no driver
    std::function<int(int*)> device_count;
    std::function<int(int*)> get_device;
    std::function<int(int)> set_device;                   // of the calling thread
    std::function<int(int*, int, int)> device_attribute;  // value, attribute, device
    std::function<int(void*, int)> device_properties;  // cudaDeviceProp, which begins with a name
    std::function<int(std::size_t*, std::size_t*)> memory_info;  // free, total
    std::function<int(void**, std::size_t)> malloc;
    std::function<int(void*)> free;
    std::function<int(void**, std::size_t)> malloc_host;
    std::function<int(void*)> free_host;
    std::function<int(void*, int, std::size_t, void*)> memset_async;
    std::function<int(void*, const void*, std::size_t, int, void*)> memcpy_async;
    std::function<int(void*, std::size_t, const void*, std::size_t, std::size_t, std::size_t, int,
                      void*)>
        memcpy_2d_async;
    std::function<int(void**, unsigned)> stream_create;
    std::function<int(void*)> stream_destroy;
    std::function<int(void*)> stream_synchronize;
    std::function<int(void*, int)> begin_capture;
    std::function<int(void*, void**)> end_capture;
    std::function<int(void**, void*, unsigned long long)> graph_instantiate;
    std::function<int(void*)> graph_destroy;
    std::function<int(void*)> graph_exec_destroy;
    std::function<int(void*, void*)> graph_launch;
    std::function<int()> last_error;  // clears it, too
    std::function<const char*(int)> error_string;

    // $PASS_CUDART, else the newest libcudart that the loader finds. Throws Error if there is none.
    static CudaApi open();
    // The name of an error after which CUDA cannot work for this process; null for other codes.
    static const char* device_lost_name(int code);
    // Throws Error if `code`, which the CUDA function `name` returned, is an error; DeviceLost if
    // later calls would fail too.
    void check(int code, const char* name) const;
    // For a message: the versions of a driver that is too old and of the library, and what to do.
    std::string driver_hint() const;
    // Throws Error if this process sees no GPU of that number.
    void require_gpu(int ordinal) const;
};

// A GPU. target: its compute capability, such as `sm89`.
struct Gpu {
    std::string name;
    std::string target;
};

// GPU `ordinal`; none if it cannot be used. Throws Error without such a GPU, if it is not GPU 0.
std::optional<Gpu> find_gpu(const CudaApi& api, int ordinal);
// A message about why `find_gpu` found none: what is missing or too old, and what to do.
std::string why_no_gpu(const CudaApi& api);

// The memory of one device, with one stream and the graphs captured on it; the destructor frees it
// all. A thread must hold `for_this_thread` to call a method.
//
// staging_bytes: the size of the pinned host memory that copies go through. Uploads that fit into
// it return at once, and only later work on this stream is sure to see them. So it must be 0 if
// other streams read the memory: uploads then return when the device is done.
class Cuda : public Memory {
   public:
    // ordinal: the GPU's number. Throws Error if there is no such GPU.
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
    // Allocate pinned host memory, into which the device can copy directly.
    std::byte* pinned(std::size_t size);
    // Enqueue a copy to the host, done after `synchronize`. Can be captured if `host` is pinned.
    void enqueue_download(void* host, const std::byte* address, std::size_t size);
    void synchronize();
    // Capture what `enqueue` puts on the stream, without running it, as a graph for `launch`.
    // Throws Error if that fails; later calls work as before.
    void* capture(const std::function<void()>& enqueue);
    void launch(void* graph) { check(api_.graph_launch(graph, stream_), "cudaGraphLaunch"); }
    // Returns, for a message, the CUDA error behind an engine's failure, and clears it; empty if
    // there is none. Throws DeviceLost if the device is lost.
    std::string why() const;

   private:
    // As CudaApi::check. Keeps the first DeviceLost; clears CUDA's record of any other error,
    // because a later launch would report it again.
    void check(int code, const char* name) const;
    // `size` bytes of the staging memory that no copy uses; null if the staging memory is smaller.
    std::byte* stage(std::size_t size);

    CudaApi api_;
    int ordinal_;
    mutable std::exception_ptr failure_;
    void* stream_ = nullptr;
    bool capturing_ = false;
    std::size_t staging_bytes_;
    std::byte* staging_ = nullptr;     // allocated when it is first used
    std::size_t in_flight_bytes_ = 0;  // the first so many the device may not have read yet
    std::unordered_set<void*> blocks_, host_blocks_, graphs_;
};

}  // namespace pass
