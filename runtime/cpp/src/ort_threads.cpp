#include "ort_threads.h"

#include <exception>
#include <latch>
#include <mutex>
#include <thread>

namespace pass {

struct LateThreads::Gate {
    std::once_flag once;
    std::latch closed{1};

    void open() {
        std::call_once(once, [this] { closed.count_down(); });
    }
};

struct LateThreads::Worker {
    std::shared_ptr<Gate> gate;
    std::thread thread;
};

LateThreads::LateThreads() : gate_(std::make_shared<Gate>()) {}

void LateThreads::give_to(const OrtLibrary& library, OrtSessionOptions* options) {
    const OrtApi& api = library.api();
    library.check(api.SessionOptionsSetCustomCreateThreadFn(options, create), "onnxruntime");
    library.check(api.SessionOptionsSetCustomThreadCreationOptions(options, &gate_), "onnxruntime");
    library.check(api.SessionOptionsSetCustomJoinThreadFn(options, join), "onnxruntime");
}

void LateThreads::begin() const { gate_->open(); }

// Null where the system has no thread left: ONNX Runtime then fails to make the session, and says so.
OrtCustomThreadHandle LateThreads::create(void* gate, OrtThreadWorkerFn work, void* of_worker) {
    try {
        auto worker = std::make_unique<Worker>();
        worker->gate = *static_cast<std::shared_ptr<Gate>*>(gate);
        worker->thread = std::thread([gate = worker->gate, work, of_worker] {
            gate->closed.wait();
            work(of_worker);
        });
        return reinterpret_cast<OrtCustomThreadHandle>(worker.release());
    } catch (const std::exception&) {
        return nullptr;
    }
}

// Also of a session that could not be made, whose threads have not begun.
void LateThreads::join(OrtCustomThreadHandle thread) {
    const std::unique_ptr<Worker> worker(reinterpret_cast<Worker*>(const_cast<OrtCustomHandleType*>(thread)));
    worker->gate->open();
    worker->thread.join();
}

}  // namespace pass
