#include "api/core.h"

#include <algorithm>

#include "backends/capabilities.h"
#include "backends/ort/backend.h"
#include "backends/trt/backend.h"
#include "backends/trt/library.h"
#include "bundle/integrity.h"
#include "errors.h"

namespace pass {

namespace {

std::unique_ptr<Backend> open_backend(const Bundle& bundle, const Manifest& manifest,
                                      const LoadOptions& options) {
    options.check();
    LoadOptions resolved = options;
    if (split_device(options.device).kind == "auto" && has_fitting_engines(manifest, options))
        resolved.device = tensorrt;
    if (split_device(resolved.device).kind != tensorrt)
        return std::make_unique<OrtBackend>(bundle.path(), manifest, resolved);
    std::unique_ptr<TrtApi> api = open_tensorrt(resolved.tensorrt);
    return std::make_unique<TrtBackend>(bundle.path(), manifest, resolved, std::move(api),
                                        CudaApi::open());
}

// Throws Error if a token id in the request is not in the vocabulary.
void check_tokens(const Request& request, std::int64_t vocab_size) {
    const auto check = [&](std::int64_t token) {
        if (token >= 0 && token < vocab_size) return;
        throw Error("token id " + std::to_string(token) + " is not in the vocabulary of " +
                    std::to_string(vocab_size));
    };
    const GenerateOptions& options = request.options;
    std::vector<std::vector<std::int64_t>> lists = options.bad_words;
    lists.insert(lists.begin(),
                 {request.prompt_ids, options.stop_token_ids, options.allowed_token_ids});
    for (const std::vector<std::int64_t>& ids : lists) std::for_each(ids.begin(), ids.end(), check);
    for (const auto& [token, bias] : options.sampling.logit_bias) check(token);
}

}  // namespace

Core::Core(Bundle bundle, std::unique_ptr<Backend> backend, const LoadOptions& options)
    : bundle_(std::move(bundle)),
      capabilities_(backend->capabilities()),
      backend_(std::move(backend)),
      engine_(*backend_, options.prefix_cache, options.speculative_max_concurrency),
      max_queue_(options.max_queue) {}

std::shared_ptr<Core> Core::open(Bundle bundle, const Bundle::Data& data,
                                 const LoadOptions& options) {
    std::unique_ptr<Backend> backend = open_backend(bundle, data.manifest, options);
    check_unchanged(data.path, data.manifest, data.identities);
    return std::make_shared<Core>(std::move(bundle), std::move(backend), options);
}

std::shared_ptr<SequenceState> Core::submit(const Request& request,
                                            std::unique_ptr<TextReader> reader) {
    auto sequence = std::make_shared<SequenceState>(resolve(request), std::move(reader), signals_);
    {
        const std::lock_guard lock(signals_->mutex);
        check_open();
        const std::int64_t waiting = signals_->unfinished - capabilities_.slots();
        if (waiting >= 0 && static_cast<std::size_t>(waiting) >= max_queue_) {
            throw QueueFull(std::to_string(waiting) +
                            " requests are waiting already, and the queue holds " +
                            std::to_string(max_queue_) +
                            ": try again later, or open the session with a larger max_queue");
        }
        engine_.add(sequence);
        signals_->unfinished += 1;
    }
    return sequence;
}

PlanChoice Core::choose(const GenerateOptions& options) const {
    const int bundle_lookahead = bundle_.lookahead(),
              lookahead = options.lookahead.value_or(bundle_lookahead);
    if (lookahead < 0 || lookahead > bundle_lookahead) {
        throw Error("look-ahead must be 0 to " + std::to_string(bundle_lookahead) +
                    ", the look-ahead of the bundle, not " + std::to_string(lookahead));
    }
    const std::optional<int> fixed = capabilities_.fixed_lookahead;
    if (fixed && (options.plan.starts_with("fused:") || (lookahead != 0 && lookahead != *fixed))) {
        throw Error("the engines run only look-ahead " + std::to_string(*fixed) +
                    " without group sizes; use --plan fused, --lookahead " +
                    std::to_string(*fixed) + " or 0");
    }
    const std::vector<Window>& verifying = capabilities_.verifying;
    const int longest_copy = verifying.empty() ? bundle_lookahead : verifying.back().drafts;
    PlanChoice result = choose_plan(options.plan, lookahead, options.draft,
                                    options.lookahead ? lookahead : longest_copy);
    if (result.lookahead_drafts > bundle_lookahead) {
        throw Error(options.plan + " has more drafts than the bundle's " +
                    std::to_string(bundle_lookahead) + "; use --plan fused");
    }
    return result;
}

ResolvedRequest Core::resolve(const Request& request) const {
    const GenerateOptions& options = request.options;
    options.check();
    if (request.prompt_ids.empty()) throw Error("the prompt has no tokens");
    check_tokens(request, bundle_.vocab_size());
    const std::int64_t capacity = capabilities_.max_capacity();
    if (static_cast<std::int64_t>(request.prompt_ids.size()) > capacity) {
        throw Error("the prompt has " + std::to_string(request.prompt_ids.size()) +
                    " tokens, more than the KV capacity of " + std::to_string(capacity) +
                    "; shorten it");
    }
    ResolvedRequest resolved;
    static_cast<PlanChoice&>(resolved) = choose(options);
    resolved.prompt_ids = request.prompt_ids;
    resolved.sampling = options.sampling.resolved();
    resolved.max_new_tokens = options.max_new_tokens;
    resolved.stop_token_ids.insert(options.stop_token_ids.begin(), options.stop_token_ids.end());
    if (!options.ignore_eos) {
        resolved.stop_token_ids.insert(bundle_.eos_token_ids().begin(),
                                       bundle_.eos_token_ids().end());
    }
    resolved.reuse_prefix = options.reuse_prefix;
    resolved.cache_salt = options.cache_salt;
    resolved.logprobs = options.logprobs;
    Processing processing{bundle_.vocab_size(),    resolved.sampling, options.min_tokens,
                          resolved.stop_token_ids, options.bad_words, options.allowed_token_ids,
                          options.allowed_tokens};
    if (processing.changes_logits()) resolved.processing = std::move(processing);
    return resolved;
}

bool Core::step() {
    std::unique_lock lock(signals_->mutex);
    signals_->changed.wait(lock, [this] { return !stepping_; });
    check_open();
    return run_engine(lock);
}

void Core::check_open() const {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    if (closed_) throw Error("this session is closed; load the bundle again");
}

void Core::wait(SequenceState& sequence) {
    std::unique_lock lock(signals_->mutex);
    while (sequence.output.events.empty() && !sequence.output.end) {
        if (stepping_) {
            signals_->changed.wait(lock);
        } else {
            run_engine(lock);
        }
    }
}

bool Core::run_engine(std::unique_lock<std::mutex>& lock) {
    bool more_to_do = false;
    run_step(lock, [&] { more_to_do = engine_.step(); });
    return more_to_do && !closed_;
}

void Core::run_step(std::unique_lock<std::mutex>& lock, const std::function<void()>& work) {
    stepping_ = true;
    lock.unlock();
    std::exception_ptr backend_error, error;
    try {
        const auto held = backend_->for_this_thread();
        if (backend_->failure() == nullptr) work();
        backend_error = error = backend_->failure();
    } catch (...) {  // a bug in the engine; waiting threads must not wait for ever
        error = std::current_exception();
    }
    if (error != nullptr) engine_.end_all({FinishReason::error, {}, error});
    lock.lock();
    failure_ = backend_error;
    closed_ = closed_ || error != nullptr;
    stepping_ = false;
    signals_->changed.notify_all();
}

void Core::between_steps(const std::function<void()>& work) {
    std::unique_lock lock(signals_->mutex);
    signals_->changed.wait(lock, [this] { return !stepping_; });
    check_open();
    std::exception_ptr error;
    run_step(lock, [&] {
        try {
            work();
        } catch (...) {
            error = std::current_exception();
        }
    });
    if (error != nullptr) std::rethrow_exception(error);
    check_open();
}

void Core::warm_up(const std::vector<SamplingParams>& samplings) {
    std::vector<Sampler> samplers;
    for (const SamplingParams& sampling : samplings) samplers.push_back(sampling.sampler());
    if (samplers.empty()) samplers = {Sampler::greedy, Sampler::sample};
    for (Sampler sampler : samplers) {
        for (int batch : capabilities_.batch_sizes)
            between_steps([&] { engine_.timed_tuner(sampler, batch); });  // times passes for `auto`
    }
    if (!capabilities_.keeps_graphs) return;
    for (std::int64_t capacity : capabilities_.capacities) {
        for (int batch : capabilities_.batch_sizes)
            between_steps([&] { engine_.capture_graphs(capacity, batch, samplers); });
    }
}

std::map<std::string, std::string> Core::uncaptured() {
    std::map<std::string, std::string> result;
    between_steps([&] { result = backend_->uncaptured(); });
    return result;
}

void Core::close(const End& end) {
    std::unique_lock lock(signals_->mutex);
    signals_->changed.wait(lock, [this] { return !stepping_; });
    if (backend_ == nullptr) return;
    closed_ = stepping_ = true;  // so that no other thread begins a step
    lock.unlock();
    {
        const auto held = backend_->for_this_thread();
        engine_.end_all(end);
        backend_.reset();
    }
    lock.lock();
    stepping_ = false;
    signals_->changed.notify_all();
}

}  // namespace pass
