// The functions of the CUDA runtime library that are used here. The library is opened when a GPU is needed.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

namespace pass {

// Every function returns 0 on success. Tests replace them.
struct CudaApi {
    std::function<int(int*)> device_count;
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

    // $PASS_CUDART, else the newest libcudart that the loader finds. Throws Error where there is none.
    static CudaApi open();
    // Whether `code` is an error after which every call of this process fails.
    static bool lost(int code);
    // Throws Error where `code` is an error: DeviceLost where `lost(code)`.
    void check(int code) const;
};

// A GPU. target: its compute capability, such as `sm89`.
struct Gpu {
    std::string name;
    std::string target;
};

// GPU 0; none without a driver or a device.
std::optional<Gpu> find_gpu(const CudaApi& api);

}  // namespace pass
