// The implementation of Session.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "backends/backend.h"
#include "decode/engine.h"
#include "pass/session.hpp"

namespace pass {

struct Bundle::Data {
    std::filesystem::path path;
    Manifest manifest;
    std::map<std::string, std::string> identities{};  // of the files before the manifest was read
};

// A thread that waits for tokens runs steps of the engine until it has some, or waits while another
// thread is in a step. Any thread may call any method.
class Core {
   public:
    // `backend` must have been opened with the manifest of `bundle`, to which it refers.
    Core(Bundle bundle, std::unique_ptr<Backend> backend, const LoadOptions& options);
    // data: that of `bundle`. Throws Error if a file has changed since it was read.
    static std::shared_ptr<Core> open(Bundle bundle, const Bundle::Data& data,
                                      const LoadOptions& options);

    // Methods without a comment are as those of Session.
    std::shared_ptr<SequenceState> submit(const Request& request,
                                          std::unique_ptr<TextReader> reader);
    bool step();
    // Wait, or decode, until `sequence` has an event to read, or its end.
    void wait(SequenceState& sequence);
    // End all sequences with `end`, and free the backend. Repeated calls do nothing.
    void close(const End& end = {FinishReason::cancelled, {}, nullptr});
    void warm_up(const std::vector<SamplingParams>& samplings);
    std::map<std::string, std::string> uncaptured();
    // Throws Error if this bundle cannot run such a request.
    PlanChoice choose(const GenerateOptions& options) const;
    const Bundle& bundle() const { return bundle_; }
    const Capabilities& capabilities() const { return capabilities_; }

   private:
    // Throws the error that closed the session.
    void check_open() const;
    // Throws Error if the request is invalid.
    ResolvedRequest resolve(const Request& request) const;
    // Returns whether there is more to do.
    bool run_engine(std::unique_lock<std::mutex>& lock);
    // Run `work` as a step: no other thread begins one meanwhile. `lock` holds the mutex of
    // `signals_`, but not while `work` runs. If `work` throws or the backend has failed, all
    // sequences end with that error, and the session closes.
    void run_step(std::unique_lock<std::mutex>& lock, const std::function<void()>& work);
    // Once no thread is in a step. Throws what `work` throws; the session stays open.
    void between_steps(const std::function<void()>& work);

    Bundle bundle_;
    Capabilities capabilities_;
    std::shared_ptr<Signals> signals_ = std::make_shared<Signals>();
    std::unique_ptr<Backend> backend_;
    Engine engine_;
    std::size_t max_queue_;
    // These are read and written under the mutex of `signals_`.
    bool stepping_ = false, closed_ = false;
    std::exception_ptr failure_;  // the error of the backend, if its failure closed the session
};

}  // namespace pass
