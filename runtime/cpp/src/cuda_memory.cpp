#include "cuda_memory.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "errors.h"

namespace pass {

namespace {

constexpr int to_device = 1, to_host = 2, on_device = 3;  // cudaMemcpyKind

void* open_library() {
    const char* named = std::getenv("PASS_CUDART");
    if (named != nullptr && *named != '\0') return dlopen(named, RTLD_NOW | RTLD_NODELETE);
    for (const char* name : {"libcudart.so.13", "libcudart.so.12", "libcudart.so"}) {
        if (void* handle = dlopen(name, RTLD_NOW | RTLD_NODELETE)) return handle;
    }
    return nullptr;
}

template <class Function>
void find(void* handle, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    if (function == nullptr) throw Error("the CUDA runtime has no " + std::string(name) + "; set PASS_CUDART to one");
}

}  // namespace

CudaApi CudaApi::open() {
    void* handle = open_library();
    if (handle == nullptr) {
        throw Error("the CUDA runtime cannot be opened (" + std::string(dlerror()) +
                    "); set PASS_CUDART to libcudart.so, or use --device cpu");
    }
    CudaApi api{};
    find(handle, "cudaMalloc", api.malloc);
    find(handle, "cudaFree", api.free);
    find(handle, "cudaMemset", api.memset);
    find(handle, "cudaMemcpy", api.memcpy);
    find(handle, "cudaMemcpy2D", api.memcpy_2d);
    find(handle, "cudaDeviceSynchronize", api.synchronize);
    find(handle, "cudaGetErrorString", api.error_string);
    return api;
}

CudaMemory::~CudaMemory() {
    for (void* block : blocks_) api_.free(block);
}

void CudaMemory::done(int code) const {
    if (code == 0) code = api_.synchronize();
    if (code != 0) {
        throw Error("CUDA error " + std::to_string(code) + " (" + api_.error_string(code) +
                    "); is the GPU visible to nvidia-smi?");
    }
}

std::byte* CudaMemory::allocate(std::size_t size) {
    void* block = nullptr;
    if (api_.malloc(&block, size) != 0) throw out_of_memory(size);
    blocks_.insert(block);
    done(api_.memset(block, 0, size));
    return static_cast<std::byte*>(block);
}

void CudaMemory::free(std::byte* address) {
    blocks_.erase(address);
    done(api_.free(address));
}

void CudaMemory::upload(std::byte* address, const void* host, std::size_t size) {
    if (size != 0) done(api_.memcpy(address, host, size, to_device));
}

void CudaMemory::download(void* host, const std::byte* address, std::size_t size) {
    if (size != 0) done(api_.memcpy(host, address, size, to_host));
}

void CudaMemory::copy_rows(std::byte* target, std::size_t pitch, const std::byte* source, std::size_t source_pitch,
                           std::size_t size, std::size_t rows) {
    done(api_.memcpy_2d(target, pitch, source, source_pitch, size, rows, on_device));
}

}  // namespace pass
