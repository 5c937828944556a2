// The CUDA runtime library, opened where a GPU is asked for: the few functions of it that are used here.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

namespace pass {

// Every function returns 0 where it succeeded. Tests put their own here.
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
    std::function<int()> last_error;  // and forgets it
    std::function<const char*(int)> error_string;

    // $PASS_CUDART, else the newest libcudart that the loader finds. Throws Error where there is none.
    static CudaApi open();
    // Throws Error where `code` is one.
    void check(int code) const;
};

// Of GPU 0. target: its compute capability, as `sm89`.
struct Gpu {
    std::string name;
    std::string target;
};

// GPU 0, none where there is none: no driver, no device.
std::optional<Gpu> find_gpu(const CudaApi& api);

}  // namespace pass
