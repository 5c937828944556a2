#include "backends/cuda.h"

#include <algorithm>
#include <cstdio>
#include <string>

#include "errors.h"

namespace pass {

namespace {

constexpr unsigned non_blocking = 1;
constexpr int to_device = 1, to_host = 2, on_device = 3;  // cudaMemcpyKind
constexpr int thread_local_capture = 1;                   // other threads may call CUDA during a capture
constexpr std::size_t engine_alignment = 256;             // which engines require

Error no_room(std::size_t size, std::size_t free, std::size_t total) {
    const auto mebibytes = [](std::size_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
    char text[192];
    std::snprintf(text, sizeof text, "the GPU has no %.0f MiB left (%.0f of %.0f MiB free); ", mebibytes(size),
                  mebibytes(free), mebibytes(total));
    return Error(std::string(text) + "stop other programs on it, or build engines with a lower --max-seq-len");
}

Error no_pinned_room(std::size_t size) {
    const std::size_t mebibytes = (size + (1 << 20) - 1) >> 20;
    return Error("the host has no " + std::to_string(mebibytes) +
                 " MiB left to pin for the GPU; stop other programs on it, or use a lower --max-batch-size");
}

}  // namespace

Cuda::Cuda(CudaApi api, int ordinal) : api_(std::move(api)), ordinal_(ordinal) {
    api_.require_gpu(ordinal);
    const auto held = for_this_thread();
    check(api_.stream_create(&stream_, non_blocking));
}

// A thread's device is its caller's again afterwards.
std::shared_ptr<void> Cuda::for_this_thread() {
    int before = ordinal_;
    api_.get_device(&before);  // the calls that follow report what fails
    if (before == ordinal_) return nullptr;
    api_.set_device(ordinal_);
    return {nullptr, [set = api_.set_device, before](void*) { set(before); }};
}

void Cuda::check(int code) const {
    try {
        api_.check(code);
    } catch (const DeviceLost&) {
        if (failure_ == nullptr) failure_ = std::current_exception();
        throw;
    }
}

void Cuda::check_device() const {
    for (const int code : {api_.stream_synchronize(stream_), api_.last_error()}) {
        if (CudaApi::lost(code)) check(code);
    }
}

Cuda::~Cuda() {
    int before = ordinal_;
    api_.get_device(&before);
    api_.set_device(ordinal_);
    api_.stream_synchronize(stream_);
    for (void* executable : executables_) api_.graph_exec_destroy(executable);
    for (void* block : blocks_) api_.free(block);
    for (void* block : host_blocks_) api_.free_host(block);
    api_.stream_destroy(stream_);
    api_.set_device(before);
}

std::byte* Cuda::allocate(std::size_t size) {
    size = (std::max<std::size_t>(size, 1) + engine_alignment - 1) / engine_alignment * engine_alignment;
    void* block = nullptr;
    if (const int code = api_.malloc(&block, size); code != 0) {
        if (CudaApi::lost(code)) check(code);
        api_.last_error();  // clears the error, which the next launch would otherwise report
        std::size_t free = 0, total = 0;
        check(api_.memory_info(&free, &total));
        throw no_room(size, free, total);
    }
    blocks_.insert(block);
    check(api_.memset_async(block, 0, size, stream_));
    synchronize();
    return static_cast<std::byte*>(block);
}

void Cuda::free(std::byte* address) {
    synchronize();
    blocks_.erase(address);
    check(api_.free(address));
}

std::byte* Cuda::pinned(std::size_t size) {
    void* block = nullptr;
    if (const int code = api_.malloc_host(&block, size); code != 0) {
        if (CudaApi::lost(code)) check(code);
        api_.last_error();  // as in `allocate`
        throw no_pinned_room(size);
    }
    host_blocks_.insert(block);
    return static_cast<std::byte*>(block);
}

void Cuda::upload(std::byte* address, const void* host, std::size_t size) {
    if (size == 0) return;
    check(api_.memcpy_async(address, host, size, to_device, stream_));
    synchronize();
}

void Cuda::download(void* host, const std::byte* address, std::size_t size) {
    if (size == 0) return;
    enqueue_download(host, address, size);
    synchronize();
}

void Cuda::enqueue_download(void* host, const std::byte* address, std::size_t size) {
    check(api_.memcpy_async(host, address, size, to_host, stream_));
}

void Cuda::copy_rows(std::byte* target, std::size_t pitch, const std::byte* source, std::size_t source_pitch,
                     std::size_t size, std::size_t rows) {
    check(api_.memcpy_2d_async(target, pitch, source, source_pitch, size, rows, on_device, stream_));
    synchronize();
}

void* Cuda::capture(const std::function<void()>& enqueue) {
    check(api_.begin_capture(stream_, thread_local_capture));
    void* graph = nullptr;
    try {
        enqueue();
    } catch (...) {
        api_.end_capture(stream_, &graph);  // may fail as well; the first error is thrown
        if (graph != nullptr) api_.graph_destroy(graph);
        throw;
    }
    check(api_.end_capture(stream_, &graph));
    void* executable = nullptr;
    const int made = api_.graph_instantiate(&executable, graph, 0);
    check(api_.graph_destroy(graph));
    check(made);
    executables_.insert(executable);
    return executable;
}

}  // namespace pass
