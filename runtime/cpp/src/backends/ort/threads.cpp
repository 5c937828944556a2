#include "backends/ort/threads.h"

#include <exception>
#include <thread>

namespace pass {

struct LateThreads::Worker {
    std::shared_ptr<Gate> gate;
    std::thread thread;
};

LateThreads::LateThreads() : gate_(std::make_shared<Gate>()) {}

void LateThreads::give_to(const OrtLibrary& library, OrtSessionOptions* options) {
    const OrtApi& api = library.api();
    library.check(api.SessionOptionsSetCustomCreateThreadFn(options, create));
    library.check(api.SessionOptionsSetCustomThreadCreationOptions(options, &gate_));
    library.check(api.SessionOptionsSetCustomJoinThreadFn(options, join));
}

void LateThreads::begin() const { open(*gate_); }

void LateThreads::open(Gate& gate) {
    gate.test_and_set();
    gate.notify_all();
}

// Returns null where the system has no thread left; ONNX Runtime then fails to create the session, with a message.
OrtCustomThreadHandle LateThreads::create(void* gate, OrtThreadWorkerFn work, void* of_worker) {
    try {
        auto worker = std::make_unique<Worker>();
        worker->gate = *static_cast<std::shared_ptr<Gate>*>(gate);
        worker->thread = std::thread([gate = worker->gate, work, of_worker] {
            gate->wait(false);
            work(of_worker);
        });
        return reinterpret_cast<OrtCustomThreadHandle>(worker.release());
    } catch (const std::exception&) {
        return nullptr;
    }
}

// Also called for a session that could not be created, whose threads have not begun to work.
void LateThreads::join(OrtCustomThreadHandle thread) {
    const std::unique_ptr<Worker> worker(reinterpret_cast<Worker*>(const_cast<OrtCustomHandleType*>(thread)));
    open(*worker->gate);
    worker->thread.join();
}

}  // namespace pass
