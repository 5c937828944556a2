#include "backends/cuda.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "errors.h"

namespace pass {

namespace {

constexpr unsigned non_blocking = 1;                      // cudaStreamNonBlocking
constexpr int to_device = 1, to_host = 2, on_device = 3;  // cudaMemcpyKind
constexpr int thread_local_capture = 1;  // cudaStreamCaptureModeThreadLocal: others may call CUDA
constexpr std::size_t device_alignment_bytes = 256;  // engines require it
constexpr std::size_t staging_alignment_bytes = 64;

std::size_t rounded_up(std::size_t size, std::size_t multiple) {
    return (size + multiple - 1) / multiple * multiple;
}

// The error to throw if the GPU has no `size` bytes left. why: CUDA's reason.
Error no_device_memory(std::size_t size, std::size_t free, std::size_t total,
                       const std::string& why) {
    const auto mebibytes = [](std::size_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
    char text[192];
    std::snprintf(text, sizeof text, "the GPU has no %.0f MiB left (%.0f of %.0f MiB free; ",
                  mebibytes(size), mebibytes(free), mebibytes(total));
    return Error(std::string(text) + why +
                 "); stop other programs on it, or build engines with a lower --max-seq-len");
}

// The error to throw if the host cannot pin `size` bytes. why: CUDA's reason.
Error no_pinned_memory(std::size_t size, const std::string& why) {
    const std::size_t mebibytes = rounded_up(size, 1 << 20) >> 20;
    return Error("the host has no " + std::to_string(mebibytes) + " MiB left to pin for the GPU (" +
                 why + "); stop other programs on it, or use a lower --max-batch-size");
}

}  // namespace

Cuda::Cuda(CudaApi api, int ordinal, std::size_t staging_bytes)
    : api_(std::move(api)), ordinal_(ordinal), staging_bytes_(staging_bytes) {
    api_.require_gpu(ordinal);
    const auto held = for_this_thread();
    check(api_.stream_create(&stream_, non_blocking), "cudaStreamCreateWithFlags");
}

// In CUDA every thread has a current device, at first GPU 0. The result, when it is destroyed,
// makes the thread's former device current again.
std::shared_ptr<void> Cuda::for_this_thread() {
    int before = ordinal_;
    api_.get_device(&before);  // if it fails, later calls report it
    if (before == ordinal_) return nullptr;
    api_.set_device(ordinal_);
    return {nullptr, [set = api_.set_device, before](void*) { set(before); }};
}

void Cuda::check(int code, const char* name) const {
    if (code == 0) return;
    try {
        api_.check(code, name);
    } catch (const DeviceLost&) {
        if (failure_ == nullptr) failure_ = std::current_exception();
        throw;
    } catch (const Error&) {
        api_.last_error();
        throw;
    }
}

void Cuda::check_device() const { why(); }

std::string Cuda::why() const {
    std::vector<std::pair<int, const char*>> errors{{api_.last_error(), "cudaGetLastError"}};
    if (!capturing_) {  // In a capture, waiting would be an error of its own.
        errors.emplace_back(api_.stream_synchronize(stream_), "cudaStreamSynchronize");
        api_.last_error();  // clears CUDA's record of the error that was just listed
    }
    for (const auto& [code, name] : errors) {
        if (CudaApi::device_lost_name(code) != nullptr) check(code, name);
    }
    for (const auto& [code, name] : errors) {
        if (code != 0)
            return "CUDA error " + std::to_string(code) + " (" + api_.error_string(code) + ")";
    }
    return "";
}

Cuda::~Cuda() {
    int before = ordinal_;
    api_.get_device(&before);
    api_.set_device(ordinal_);
    api_.stream_synchronize(stream_);
    for (void* graph : graphs_) api_.graph_exec_destroy(graph);
    for (void* block : blocks_) api_.free(block);
    for (void* block : host_blocks_) api_.free_host(block);
    api_.stream_destroy(stream_);
    api_.set_device(before);
}

std::byte* Cuda::allocate(std::size_t size) {
    size = rounded_up(std::max<std::size_t>(size, 1), device_alignment_bytes);
    void* block = nullptr;
    try {
        check(api_.malloc(&block, size), "cudaMalloc");
    } catch (const DeviceLost&) {
        throw;
    } catch (const Error& error) {
        std::size_t free = 0, total = 0;
        check(api_.memory_info(&free, &total), "cudaMemGetInfo");
        throw no_device_memory(size, free, total, error.what());
    }
    blocks_.insert(block);
    check(api_.memset_async(block, 0, size, stream_), "cudaMemsetAsync");
    synchronize();
    return static_cast<std::byte*>(block);
}

void Cuda::free(std::byte* address) {
    synchronize();
    blocks_.erase(address);
    check(api_.free(address), "cudaFree");
}

std::byte* Cuda::pinned(std::size_t size) {
    void* block = nullptr;
    try {
        check(api_.malloc_host(&block, size), "cudaMallocHost");
    } catch (const DeviceLost&) {
        throw;
    } catch (const Error& error) {
        throw no_pinned_memory(size, error.what());
    }
    host_blocks_.insert(block);
    return static_cast<std::byte*>(block);
}

void Cuda::upload(std::byte* address, const void* host, std::size_t size) {
    if (size == 0) return;
    std::byte* staged = stage(size);
    if (staged != nullptr) std::memcpy(staged, host, size);
    check(api_.memcpy_async(address, staged != nullptr ? staged : host, size, to_device, stream_),
          "cudaMemcpyAsync");
    if (staged == nullptr) synchronize();
}

void Cuda::download(void* host, const std::byte* address, std::size_t size) {
    if (size == 0) return;
    std::byte* staged = stage(size);
    enqueue_download(staged != nullptr ? staged : host, address, size);
    synchronize();
    if (staged != nullptr) std::memcpy(host, staged, size);
}

void Cuda::enqueue_download(void* host, const std::byte* address, std::size_t size) {
    check(api_.memcpy_async(host, address, size, to_host, stream_), "cudaMemcpyAsync");
}

void Cuda::copy_rows(std::byte* target, std::size_t pitch, const std::byte* source,
                     std::size_t source_pitch, std::size_t size, std::size_t rows) {
    check(api_.memcpy_2d_async(target, pitch, source, source_pitch, size, rows, on_device, stream_),
          "cudaMemcpy2DAsync");
    synchronize();
}

std::byte* Cuda::stage(std::size_t size) {
    if (size > staging_bytes_) return nullptr;
    if (staging_ == nullptr) staging_ = pinned(staging_bytes_);
    if (in_flight_bytes_ + size > staging_bytes_) synchronize();
    std::byte* staged = staging_ + in_flight_bytes_;
    in_flight_bytes_ += rounded_up(size, staging_alignment_bytes);
    return staged;
}

void Cuda::synchronize() {
    check(api_.stream_synchronize(stream_), "cudaStreamSynchronize");
    in_flight_bytes_ = 0;
}

void* Cuda::capture(const std::function<void()>& enqueue) {
    check(api_.begin_capture(stream_, thread_local_capture), "cudaStreamBeginCapture");
    void* captured = nullptr;
    capturing_ = true;
    try {
        enqueue();
    } catch (...) {
        capturing_ = false;
        api_.end_capture(stream_, &captured);  // It may fail as well; the first error is thrown.
        if (captured != nullptr) api_.graph_destroy(captured);
        api_.last_error();
        throw;
    }
    capturing_ = false;
    check(api_.end_capture(stream_, &captured), "cudaStreamEndCapture");
    void* graph = nullptr;
    const int code = api_.graph_instantiate(&graph, captured, 0);
    check(api_.graph_destroy(captured), "cudaGraphDestroy");
    check(code, "cudaGraphInstantiate");
    graphs_.insert(graph);
    return graph;
}

}  // namespace pass
