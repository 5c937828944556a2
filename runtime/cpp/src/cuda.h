// A GPU's memory, one stream of it, and what is captured from that stream.
#pragma once

#include <functional>
#include <unordered_set>

#include "cuda_api.h"
#include "memory.h"

namespace pass {

// Everything that was allocated here goes with it. What other streams may read is done when a method returns.
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

    void* stream() const { return stream_; }
    // Host memory that the device copies to without staging.
    std::byte* pinned(std::size_t size);
    // Copy to the host behind what the stream has to do; valid after `synchronize`. Capturable where `host` is pinned.
    void enqueue_download(void* host, const std::byte* address, std::size_t size);
    void synchronize() const { api_.check(api_.stream_synchronize(stream_)); }
    // What `enqueue` puts on the stream, as a graph to `launch`. Nothing of it is run.
    void* capture(const std::function<void()>& enqueue);
    void launch(void* executable) { api_.check(api_.graph_launch(executable, stream_)); }

   private:
    CudaApi api_;
    void* stream_ = nullptr;
    std::unordered_set<void*> blocks_, host_blocks_, executables_;
};

}  // namespace pass
