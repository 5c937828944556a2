// A GPU's memory, by the CUDA runtime library, which is opened where a GPU is asked for.
#pragma once

#include <unordered_set>

#include "memory.h"

namespace pass {

// Its few functions that are used; each returns 0 where it succeeded.
struct CudaApi {
    int (*malloc)(void**, std::size_t);
    int (*free)(void*);
    int (*memset)(void*, int, std::size_t);
    int (*memcpy)(void*, const void*, std::size_t, int);
    int (*memcpy_2d)(void*, std::size_t, const void*, std::size_t, std::size_t, std::size_t, int);
    int (*synchronize)();
    const char* (*error_string)(int);

    // $PASS_CUDART, else the newest libcudart that the loader finds. Throws Error where there is none.
    static CudaApi open();
};

class CudaMemory : public Memory {
   public:
    CudaMemory() : CudaMemory(CudaApi::open()) {}
    explicit CudaMemory(const CudaApi& api) : api_(api) {}
    ~CudaMemory() override;
    CudaMemory(const CudaMemory&) = delete;
    CudaMemory& operator=(const CudaMemory&) = delete;

    std::byte* allocate(std::size_t size) override;
    void free(std::byte* address) override;
    void upload(std::byte* address, const void* host, std::size_t size) override;
    void download(void* host, const std::byte* address, std::size_t size) override;
    void copy_rows(std::byte* target, std::size_t pitch, const std::byte* source, std::size_t source_pitch,
                   std::size_t size, std::size_t rows) override;

   private:
    // Throws Error where `code` is one; waits for the device, since copies may return before they are done.
    void done(int code) const;

    CudaApi api_;
    std::unordered_set<void*> blocks_;
};

}  // namespace pass
