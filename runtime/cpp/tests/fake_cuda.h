// A fake of the CUDA runtime, as tests/runtime/fake_cuda.py. It refuses what a device would refuse,
// or what would corrupt its memory. Work runs only when somebody waits for it.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda.h"

namespace pass::test {

inline constexpr std::size_t cuda_alignment = 256;  // bytes, of cudaMalloc's addresses

inline void require(bool holds, const std::string& what) {
    if (!holds) throw std::logic_error(what);
}

class FakeCuda {
   public:
    using Graph = std::vector<std::function<void()>>;

    std::size_t limit = std::size_t{1} << 30;    // bytes of device memory
    int fail_malloc = 0;                         // the allocation that counts it down to 0 fails
    int devices = 1, major = 9, minor = 0;       // major, minor: the compute capability
    int driver = 13040;                          // 0: no driver
    int ordinal = 0;                             // the only device that may be used
    static inline thread_local int current = 0;  // device
    int mallocs = 0, launches = 0, captures = 0;
    int works = 0;        // copies and runs outside of captured graphs
    int error = 0;        // until `last_error` is called
    int sticky = 0;       // if not 0, most calls return it
    int undestroyed = 0;  // captured graphs
    int waits = 0;
    std::string fail_capture;  // begin, end or instantiate
    std::unique_ptr<Graph> capturing;

    CudaApi api() {
        CudaApi api;
        api.driver_version = [this](int* version) { return *version = driver, 0; };
        api.runtime_version = [](int* version) { return *version = 13040, 0; };
        api.device_count = [this](int* count) {
            if (driver < 13000) return error = 35;  // cudaErrorInsufficientDriver
            return *count = devices, 0;
        };
        api.get_device = [](int* device) { return *device = current, 0; };
        api.set_device = [](int device) { return current = device, 0; };
        api.device_attribute = [this](int* value, int attribute, int device) {
            require(device == ordinal, "another device is looked at");
            // 75 is cudaDevAttrComputeCapabilityMajor.
            return *value = attribute == 75 ? major : minor, 0;
        };
        api.device_properties = [](void* name, int) {
            return std::strcpy(static_cast<char*>(name), "Fake GPU"), 0;
        };
        api.memory_info = [this](std::size_t* free, std::size_t* total) {
            return *free = limit - used(), *total = limit, 0;
        };
        api.malloc = [this](void** block, std::size_t size) { return take(block, size); };
        api.free = [this](void* block) { return give_back(blocks_, block); };
        api.malloc_host = [this](void** block, std::size_t size) {
            require(!capturing, "pinned inside a capture");
            if (--fail_malloc == 0) return error = 2;  // cudaErrorMemoryAllocation
            return *block = add(pinned_, size, std::byte{0}), 0;
        };
        api.free_host = [this](void* block) { return give_back(pinned_, block); };
        api.memset_async = [this](void* block, int value, std::size_t size, void* stream) {
            require(on_device(block, size) && has_stream(stream), "memset elsewhere");
            submit([=] { std::memset(block, value, size); });
            return 0;
        };
        api.memcpy_async = [this](void* to, const void* from, std::size_t size, int kind,
                                  void* stream) { return copy(to, from, size, kind, stream); };
        api.memcpy_2d_async = [this](void* to, std::size_t pitch, const void* from,
                                     std::size_t source_pitch, std::size_t size, std::size_t rows,
                                     int kind, void* stream) {
            return copy_rows(to, pitch, from, source_pitch, size, rows, kind, stream);
        };
        api.stream_create = [this](void** stream, unsigned) {
            require(current == ordinal, "a stream of another device");
            *stream = handle();
            streams_.insert(*stream);
            return 0;
        };
        api.stream_destroy = [this](void* stream) { return streams_.erase(stream) == 1 ? 0 : 1; };
        api.stream_synchronize = [this](void* stream) {
            require(has_stream(stream), "no such stream");
            if (sticky != 0) return sticky;
            if (capturing) return error = 900;  // cudaErrorStreamCaptureUnsupported
            waits += 1;
            finish();
            return 0;
        };
        api.begin_capture = [this](void*, int) {
            require(!capturing, "a capture in a capture");
            if (fail_capture == "begin") return error = 901;  // cudaErrorStreamCaptureInvalidated
            capturing = std::make_unique<Graph>();
            return 0;
        };
        api.end_capture = [this](void*, void** graph) {
            if (fail_capture == "end") {
                capturing.reset();
                *graph = nullptr;
                return error = 901;
            }
            undestroyed += 1;
            *graph = capturing.release();
            return 0;
        };
        api.graph_instantiate = [this](void** made, void* graph, unsigned long long) {
            if (fail_capture == "instantiate") return error = 901;
            captures += 1;
            *made = handle();
            graphs_.emplace(*made, *static_cast<Graph*>(graph));
            return 0;
        };
        api.graph_destroy = [this](void* graph) {
            undestroyed -= 1;
            delete static_cast<Graph*>(graph);
            return 0;
        };
        api.graph_exec_destroy = [this](void* made) { return graphs_.erase(made) == 1 ? 0 : 1; };
        api.graph_launch = [this](void* made, void* stream) {
            require(has_stream(stream), "no such stream");
            if (sticky != 0) return sticky;
            launches += 1;
            for (const auto& work : graphs_.at(made)) pending_.push_back(work);
            return 0;
        };
        api.last_error = [this] { return sticky != 0 ? sticky : std::exchange(error, 0); };
        api.error_string = [](int code) { return code == 2 ? "out of memory" : "an error"; };
        return api;
    }

    void submit(std::function<void()> work) {
        if (capturing) {
            capturing->push_back(std::move(work));
            return;
        }
        works += 1;
        pending_.push_back(std::move(work));
    }

    void finish() {
        while (!pending_.empty()) {
            const auto work = std::move(pending_.front());
            pending_.pop_front();
            work();
        }
    }

    bool on_device(const void* address, std::size_t size) const {
        return within(blocks_, address, size);
    }
    bool has_stream(void* stream) const { return current == ordinal && streams_.contains(stream); }
    bool all_freed() const {
        return blocks_.empty() && pinned_.empty() && streams_.empty() && graphs_.empty() &&
               undestroyed == 0 && !capturing;
    }

   private:
    struct Block {
        std::vector<std::byte> memory;
        std::size_t size;
    };
    using Blocks = std::map<const std::byte*, Block>;  // by aligned address

    static bool within(const Blocks& blocks, const void* address, std::size_t size) {
        const auto* first = static_cast<const std::byte*>(address);
        auto found = blocks.upper_bound(first);
        if (found == blocks.begin()) return false;
        --found;
        return first + size <= found->first + found->second.size;
    }

    static void* add(Blocks& blocks, std::size_t size, std::byte junk) {
        Block block{std::vector<std::byte>(size + cuda_alignment, junk), size};
        std::byte* address = block.memory.data();
        const std::size_t offset = reinterpret_cast<std::uintptr_t>(address) % cuda_alignment;
        if (offset != 0) address += cuda_alignment - offset;
        blocks.emplace(address, std::move(block));
        return address;
    }

    int give_back(Blocks& blocks, void* block) {
        require(!capturing, "freed inside a capture");
        finish();
        return blocks.erase(static_cast<const std::byte*>(block)) == 1 ? 0 : 1;
    }

    int take(void** block, std::size_t size) {
        require(!capturing && current == ordinal,
                "allocated inside a capture, or on another device");
        if (sticky != 0) return sticky;
        if (--fail_malloc == 0 || used() + size > limit) return error = 2;
        mallocs += 1;
        *block = add(blocks_, size, std::byte{0xA5});
        return 0;
    }

    // kind: 1 to the device, 2 to the host.
    int copy(void* to, const void* from, std::size_t size, int kind, void* stream) {
        require(has_stream(stream), "no such stream");
        require(on_device(kind == 1 ? to : from, size), "not the device's memory");
        if (sticky != 0) return sticky;
        const bool pinned = within(pinned_, kind == 1 ? from : to, size);
        if (capturing) require(kind == 2 && pinned, "a captured copy must be to pinned memory");
        if (kind == 1 && !pinned) {  // read before the call returns
            const auto* first = static_cast<const std::byte*>(from);
            submit([to, copied = std::vector<std::byte>(first, first + size)] {
                std::memcpy(to, copied.data(), copied.size());
            });
        } else {
            submit([=] { std::memcpy(to, from, size); });
        }
        if (kind == 2 && !pinned) finish();  // filled before the call returns
        return 0;
    }

    int copy_rows(void* to, std::size_t pitch, const void* from, std::size_t source_pitch,
                  std::size_t size, std::size_t rows, int kind, void* stream) {
        require(has_stream(stream) && kind == 3 && size <= pitch && size <= source_pitch,
                "a wrong copy");
        if (rows > 0) {
            require(on_device(to, (rows - 1) * pitch + size), "not the device's memory");
            require(on_device(from, (rows - 1) * source_pitch + size), "not the device's memory");
        }
        submit([=] {
            for (std::size_t row = 0; row < rows; ++row) {
                std::memcpy(static_cast<std::byte*>(to) + row * pitch,
                            static_cast<const std::byte*>(from) + row * source_pitch, size);
            }
        });
        return 0;
    }

    std::size_t used() const {
        std::size_t sum = 0;
        for (const auto& [address, block] : blocks_) sum += block.size;
        return sum;
    }

    void* handle() { return reinterpret_cast<void*>(++handles_); }

    Blocks blocks_, pinned_;
    std::deque<std::function<void()>> pending_;
    std::set<void*> streams_;
    std::map<void*, Graph> graphs_;
    std::uintptr_t handles_ = 0;
};

}  // namespace pass::test
