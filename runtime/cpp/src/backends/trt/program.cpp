#include "backends/trt/program.h"

#include <algorithm>

namespace pass {

void TrtProgram::run() {
    if (graph_ != nullptr) {
        cuda_.launch(graph_);
        cuda_.synchronize();
        return;
    }
    enqueue();
    cuda_.synchronize();
    // Captured only after a run: the first run with new shapes may do work that a capture does not allow.
    const auto capturable = [](auto& one) { return one.first->capturable(one.second); };
    if (repeated_ && std::all_of(work_.begin(), work_.end(), capturable)) {
        graph_ = cuda_.capture([this] { enqueue(); });
    }
    repeated_ = true;
}

void TrtProgram::enqueue() {
    for (auto& [engine, binding] : work_) engine->enqueue(binding);
    for (const Copy& copy : copies_) cuda_.enqueue_download(copy.host, copy.address, copy.size);
}

}  // namespace pass
