// Work on the stream that is repeated: run twice as it is, the second time captured as a CUDA graph, then replayed.
#pragma once

#include <utility>
#include <vector>

#include "trt_engine.h"

namespace pass {

// Engines on their memory, one after another, and what the host wants to know in the end.
class TrtProgram {
   public:
    using Work = std::vector<std::pair<TrtEngine*, TrtBinding>>;
    // Pinned memory, which is filled from a device address.
    struct Copy {
        std::byte* host;
        const std::byte* address;
        std::size_t size;
    };

    TrtProgram(Cuda& cuda, Work work, std::vector<Copy> copies = {})
        : cuda_(cuda), work_(std::move(work)), copies_(std::move(copies)) {}

    // Returns when the device has done it.
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
