// The memory of a GPU, one stream, and the CUDA graphs captured from that stream.
#pragma once

#include <functional>
#include <unordered_set>

#include "backends/cuda_api.h"
#include "backends/memory.h"

namespace pass {

// Frees in the end everything that was allocated from it. A method returns when the device has done its work, unless it
// says otherwise.
class Cuda : public Memory {
   public:
    explicit Cuda(CudaApi api);
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

    void* stream() const { return stream_; }
    // Pinned host memory, into which the device can copy directly.
    std::byte* pinned(std::size_t size);
    // Enqueue a copy to the host on the stream; it is done after `synchronize`. Can be captured where `host` is pinned.
    void enqueue_download(void* host, const std::byte* address, std::size_t size);
    void synchronize() const { check(api_.stream_synchronize(stream_)); }
    // Capture what `enqueue` puts on the stream, as a graph for `launch`. None of it is run.
    void* capture(const std::function<void()>& enqueue);
    void launch(void* executable) { check(api_.graph_launch(executable, stream_)); }

   private:
    // Throws Error where `code` is an error; keeps the first DeviceLost.
    void check(int code) const;

    CudaApi api_;
    mutable std::exception_ptr failure_;
    void* stream_ = nullptr;
    std::unordered_set<void*> blocks_, host_blocks_, executables_;
};

}  // namespace pass
