// Work that is run again and again: launched directly twice, captured after the second time, and then launched as a
// CUDA graph.
#pragma once

#include <utility>
#include <vector>

#include "backends/trt/engine.h"

namespace pass {

// Engines that run one after another, and copies to the host after them.
class TrtProgram {
   public:
    using Work = std::vector<std::pair<TrtEngine*, TrtBinding>>;
    // A copy from a device address into pinned host memory.
    struct Copy {
        std::byte* host;
        const std::byte* address;
        std::size_t size;
    };

    TrtProgram(Cuda& cuda, Work work, std::vector<Copy> copies = {})
        : cuda_(cuda), work_(std::move(work)), copies_(std::move(copies)) {}

    // Returns when the device is done.
    void run();

   private:
    void enqueue();

    Cuda& cuda_;
    Work work_;
    std::vector<Copy> copies_;
    bool repeated_ = false;
    void* graph_ = nullptr;
};

}  // namespace pass
