// The parts of a session (bundle, backend, scheduler), and which waiting thread decodes.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "backends/backend.h"
#include "decode/draft_policy.h"
#include "decode/runner.h"
#include "decode/scheduler.h"
#include "pass/session.hpp"
#include "tuning/tuner.h"

namespace pass {

struct Bundle::Data {
    std::filesystem::path path;
    Manifest manifest;
};

// A thread that waits for tokens runs one step of the scheduler. If another thread is in a step, it
// waits until that step is done, and looks for its tokens again. Any thread may call any method.
class Core {
   public:
    // `backend` must have been opened with the manifest of `bundle`.
    Core(Bundle bundle, std::unique_ptr<Backend> backend, const LoadOptions& options);
    // Opens the backend that `options` names; `manifest` is that of `bundle`.
    static std::shared_ptr<Core> open(Bundle bundle, const Manifest& manifest,
                                      const LoadOptions& options);

    // submit, step, warm_up, uncaptured: as in Session.
    std::shared_ptr<SequenceState> submit(const Request& request,
                                          std::unique_ptr<TextReader> reader);
    bool step();
    // Wait until `sequence` has something to read in its `output`.
    void wait(SequenceState& sequence);
    // End all sequences with `end`, and free the backend.
    void close(const End& end = {FinishReason::cancelled, {}, nullptr});
    void warm_up(const std::vector<SamplingParams>& samplings);
    std::map<std::string, std::string> uncaptured();
    // How a request with these options is decoded. Throws Error if this bundle cannot run it.
    DraftChoice choose(const GenerateOptions& options) const;
    const Bundle& bundle() const { return bundle_; }
    const Capabilities& capabilities() const { return capabilities_; }
    const std::shared_ptr<Signals>& signals() const { return signals_; }

   private:
    // Throws Error if the session is closed.
    void check_open() const;
    ResolvedRequest resolve(const Request& request) const;
    // Run one step of the scheduler in `run_step`. Returns whether there is more to do.
    bool run_scheduler(std::unique_lock<std::mutex>& lock);
    // Run `work` as a step, while no other thread is in one. `lock`, on the mutex of `signals_`, is
    // released meanwhile. If `work` throws or the device is lost, closes the session.
    void run_step(std::unique_lock<std::mutex>& lock, const std::function<void()>& work);
    // Run `work` when no thread is in a step. Throws what `work` throws.
    void between_steps(const std::function<void()>& work);

    Bundle bundle_;
    Capabilities capabilities_;
    bool can_process_;  // whether the bundle has logits processors
    std::shared_ptr<Signals> signals_ = std::make_shared<Signals>();
    std::unique_ptr<Backend> backend_;
    Runner runner_;
    Tuners tuners_;
    Scheduler scheduler_;
    std::size_t max_queue_;
    bool stepping_ = false, closed_ = false;  // under the mutex of `signals_`
    std::exception_ptr failure_;              // of the device, if that closed the session
};

}  // namespace pass
