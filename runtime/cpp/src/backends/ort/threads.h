// Worker threads of an ONNX Runtime session that start to work only when the session has been created.
//
// ONNX Runtime's workers spin while they wait for work. During the creation of a session there is hardly any, so they
// would only take cores from the hashing of the bundle's files. (Threads that ONNX Runtime creates itself are pinned to
// cores if it chooses their number; these are not.)
#pragma once

#include <atomic>
#include <memory>

#include "backends/ort/library.h"

namespace pass {

class LateThreads {
   public:
    LateThreads();

    // Make sessions of `options` use such threads. `options` must not be used after this object is destroyed. Throws
    // Error where ONNX Runtime refuses.
    void give_to(const OrtLibrary& library, OrtSessionOptions* options);

    // Let the threads work.
    void begin() const;

   private:
    using Gate = std::atomic_flag;  // set once threads may work
    static void open(Gate& gate);
    static OrtCustomThreadHandle create(void* gate, OrtThreadWorkerFn work, void* of_worker);
    static void join(OrtCustomThreadHandle thread);

    struct Worker;
    std::shared_ptr<Gate> gate_;
};

}  // namespace pass
