// What a session is: bundle, backend, scheduler, and the turns of those who decode.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "backend.h"
#include "draft_policy.h"
#include "pass/session.hpp"
#include "runner.h"
#include "scheduler.h"
#include "tuners.h"

namespace pass {

struct Bundle::Data {
    std::filesystem::path path;
    Manifest manifest;
};

// Whoever waits takes a turn: one round of the scheduler, on the waiting thread, while others wait for theirs or for
// what the round brings. Everything here is for any thread.
class Core {
   public:
    // `backend` is over the bundle's manifest.
    Core(Bundle bundle, std::unique_ptr<Backend> backend, std::size_t max_queue);
    // With ONNX Runtime; `manifest` is the bundle's.
    static std::shared_ptr<Core> open(Bundle bundle, const Manifest& manifest, const LoadOptions& options);

    std::shared_ptr<Sequence> submit(const Request& request, std::unique_ptr<TextReader> reader);
    bool step();
    // Until `sequence` has something to read, which is left in its mail.
    void wait(Sequence& sequence);
    void close();
    Mode mode(const GenerateOptions& options) const;
    const Bundle& bundle() const { return bundle_; }
    const Capabilities& capabilities() const { return capabilities_; }
    const std::shared_ptr<Signals>& signals() const { return signals_; }

   private:
    Work work_for(const Request& request) const;
    // A round, where it is nobody else's turn; `lock` is of `signals_`.
    bool take_turn(std::unique_lock<std::mutex>& lock);

    Bundle bundle_;
    Capabilities capabilities_;
    std::shared_ptr<Signals> signals_ = std::make_shared<Signals>();
    std::unique_ptr<Backend> backend_;
    Runner runner_;
    Tuners tuners_;
    Scheduler scheduler_;
    bool stepping_ = false, closed_ = false;  // under the mutex of `signals_`
};

}  // namespace pass
