// The worker threads of an ONNX Runtime session, which begin when the session is made.
//
// They spin while they wait for work, and while a session is made there is hardly any: they would only take a core from
// whoever else is at work then, as the hashing of the bundle's files. (ONNX Runtime pins threads of its own to cores
// where it chooses their number; these are where the system puts them.)
#pragma once

#include <atomic>
#include <memory>

#include "ort_library.h"

namespace pass {

class LateThreads {
   public:
    LateThreads();

    // `options` must not be used longer than this lives. Throws Error where ONNX Runtime refuses.
    void give_to(const OrtLibrary& library, OrtSessionOptions* options);

    void begin() const;

   private:
    using Gate = std::atomic_flag;  // set where threads may begin
    static void open(Gate& gate);
    static OrtCustomThreadHandle create(void* gate, OrtThreadWorkerFn work, void* of_worker);
    static void join(OrtCustomThreadHandle thread);

    struct Worker;
    std::shared_ptr<Gate> gate_;
};

}  // namespace pass
