// The implementation of Session: its parts (bundle, backend, runner, scheduler), and which of the
// threads that wait for tokens decodes.
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
    std::map<std::string, std::string> identities{};  // of the files before the manifest was read
};

// A thread that waits for tokens runs steps of the scheduler until it has some. While another
// thread is in a step, it waits for that step's end instead. Any thread may call any method.
class Core {
   public:
    // `backend` must have been opened with the manifest of `bundle`, to which it refers.
    Core(Bundle bundle, std::unique_ptr<Backend> backend, const LoadOptions& options);
    // Opens the backend for the device of `options`. data: that of `bundle`. Throws Error if a file
    // has changed since it was read.
    static std::shared_ptr<Core> open(Bundle bundle, const Bundle::Data& data,
                                      const LoadOptions& options);

    // submit, step, warm_up, uncaptured: as the methods of Session.
    std::shared_ptr<SequenceState> submit(const Request& request,
                                          std::unique_ptr<TextReader> reader);
    bool step();
    // Wait, or decode, until `sequence` has an event to read, or its end.
    void wait(SequenceState& sequence);
    // End all sequences with `end`, and free the backend. Repeated calls do nothing.
    void close(const End& end = {FinishReason::cancelled, {}, nullptr});
    void warm_up(const std::vector<SamplingParams>& samplings);
    std::map<std::string, std::string> uncaptured();
    // How a request with these options is decoded. Throws Error if this bundle cannot run it.
    DraftChoice choose(const GenerateOptions& options) const;
    const Bundle& bundle() const { return bundle_; }
    const Capabilities& capabilities() const { return capabilities_; }

   private:
    // Throws Error if the session is closed: that of the backend if its failure closed the session.
    void check_open() const;
    // The request with all defaults filled in. Throws Error if it is invalid.
    ResolvedRequest resolve(const Request& request) const;
    // Run one step of the scheduler. lock: as for `run_step`. Returns whether there is more to do.
    bool run_scheduler(std::unique_lock<std::mutex>& lock);
    // Run `work` as a step: no other thread begins a step meanwhile. `lock` holds the mutex of
    // `signals_`, which is released while `work` runs. If `work` throws or the backend has failed,
    // ends all sequences with that error, and closes the session.
    void run_step(std::unique_lock<std::mutex>& lock, const std::function<void()>& work);
    // Run `work` once no thread is in a step. Throws what `work` throws; the session stays open.
    void between_steps(const std::function<void()>& work);

    Bundle bundle_;
    Capabilities capabilities_;
    bool has_processors_;  // whether the bundle has a graph of logits processors
    std::shared_ptr<Signals> signals_ = std::make_shared<Signals>();
    std::unique_ptr<Backend> backend_;
    Runner runner_;
    Tuners tuners_;
    Scheduler scheduler_;
    std::size_t max_queue_;
    // These are read and written under the mutex of `signals_`.
    bool stepping_ = false, closed_ = false;
    std::exception_ptr failure_;  // the error of the backend, if its failure closed the session
};

}  // namespace pass
