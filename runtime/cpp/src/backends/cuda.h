// The CUDA runtime library, opened when a GPU is needed; the memory of a GPU, one stream, and the CUDA graphs captured
// from that stream.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <unordered_set>

#include "backends/memory.h"

namespace pass {

// The functions of the library that are used here.
// Every function returns 0 on success. Tests replace them.
struct CudaApi {
    std::function<int(int*)> driver_version, runtime_version;  // as 13040 for 13.4; driver: 0 if there is none
    std::function<int(int*)> device_count;
    std::function<int(int*)> get_device;
    std::function<int(int)> set_device;                          // of the calling thread
    std::function<int(int*, int, int)> device_attribute;         // value, attribute, device
    std::function<int(void*, int)> device_properties;            // cudaDeviceProp: its name comes first
    std::function<int(std::size_t*, std::size_t*)> memory_info;  // free, total
    std::function<int(void**, std::size_t)> malloc;
    std::function<int(void*)> free;
    std::function<int(void**, std::size_t)> malloc_host;
    std::function<int(void*)> free_host;
    std::function<int(void*, int, std::size_t, void*)> memset_async;
    std::function<int(void*, const void*, std::size_t, int, void*)> memcpy_async;
    std::function<int(void*, std::size_t, const void*, std::size_t, std::size_t, std::size_t, int, void*)>
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
    std::function<int()> last_error;  // and clears it
    std::function<const char*(int)> error_string;

    // $PASS_CUDART, else the newest libcudart that the loader finds. Throws Error if there is none.
    static CudaApi open();
    // The name of `code` if it is an error after which every call of this process fails; null if it is not.
    static const char* lost(int code);
    // Throws Error if `code`, which the CUDA function `name` returned, is an error: DeviceLost if `lost(code)`.
    void check(int code, const char* name) const;
    // What to do about a driver that is older than the library, with the versions of both.
    std::string driver_hint() const;
    // Throws Error if fewer GPUs are visible than it needs for number `ordinal`.
    void require_gpu(int ordinal) const;
};

// A GPU. target: its compute capability, such as `sm89`.
struct Gpu {
    std::string name;
    std::string target;
};

// GPU number `ordinal`; none without a driver, or with fewer devices.
std::optional<Gpu> find_gpu(const CudaApi& api, int ordinal);
// Why `find_gpu` found none, for a message: what is missing or too old, and what to do.
std::string why_no_gpu(const CudaApi& api);

// Frees in the end everything that was allocated from it. A method returns when the device has done its work, unless it
// says otherwise.
//
// staging: bytes of pinned host memory that copies go through, if nothing but this stream uses the memory. Uploads
// of no more than that then return at once, and what is put on the stream later sees them.
class Cuda : public Memory {
   public:
    // On GPU number `ordinal`. Throws Error if there is none.
    Cuda(CudaApi api, int ordinal, std::size_t staging = 0);
    ~Cuda() override;
    Cuda(const Cuda&) = delete;
    Cuda& operator=(const Cuda&) = delete;

    std::byte* allocate(std::size_t size) override;
    void free(std::byte* address) override;
    void upload(std::byte* address, const void* host, std::size_t size) override;
    void download(void* host, const std::byte* address, std::size_t size) override;
    void copy_rows(std::byte* target, std::size_t pitch, const std::byte* source, std::size_t source_pitch,
                   std::size_t size, std::size_t rows) override;

    std::exception_ptr failure() const override { return failure_; }
    void check_device() const override;
    std::shared_ptr<void> for_this_thread() override;

    void* stream() const { return stream_; }
    // Pinned host memory, into which the device can copy directly.
    std::byte* pinned(std::size_t size);
    // Enqueue a copy to the host on the stream; it is done after `synchronize`. Can be captured if `host` is pinned.
    void enqueue_download(void* host, const std::byte* address, std::size_t size);
    void synchronize();
    // Capture what `enqueue` puts on the stream, as a graph for `launch`. None of it is run. Throws Error if that
    // cannot be captured: then the stream captures no more, and no error is left for later calls.
    void* capture(const std::function<void()>& enqueue);
    void launch(void* executable) { check(api_.graph_launch(executable, stream_), "cudaGraphLaunch"); }
    // The CUDA error that an engine met when it failed, which is cleared, as words for a message; empty if there was
    // none. Throws DeviceLost if the device is lost.
    std::string why() const;

   private:
    // Throws Error if `code`, of the function `name`, is an error; keeps the first DeviceLost. CUDA's own
    // record of the error is cleared: it would be taken for the error of a later launch.
    void check(int code, const char* name) const;
    // `size` bytes of the staging memory, which no copy is using; null if they are too many.
    std::byte* stage(std::size_t size);

    CudaApi api_;
    int ordinal_;
    mutable std::exception_ptr failure_;
    void* stream_ = nullptr;
    bool capturing_ = false;
    std::size_t staging_, in_flight_ = 0;  // in flight: bytes of the staging memory that the device may not have read
    std::byte* staged_ = nullptr;
    std::unordered_set<void*> blocks_, host_blocks_, executables_;
};

}  // namespace pass
