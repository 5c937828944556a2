#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "bundle/window.h"
#include "decode/copies.h"
#include "decode/processors.h"
#include "pass/event.hpp"
#include "pass/options.hpp"
#include "text/text_reader.h"
#include "tuning/auto.h"

namespace pass {

// name: in statistics. plan: none if `auto` chooses it. ..._drafts: the most of a pass.
struct PlanChoice {
    std::string plan_name = "ar";
    std::optional<Plan> plan;
    int lookahead_drafts = 0;
    int ngram_drafts = 0;
};

// A request whose defaults are filled in.
struct ResolvedRequest : PlanChoice {
    std::vector<std::int64_t> prompt_ids;
    SamplingParams sampling;
    std::int64_t max_new_tokens = 0;
    std::set<std::int64_t> stop_token_ids;
    bool reuse_prefix = false;
    std::string cache_salt{};
    std::optional<int> logprobs;
    std::optional<Processing> processing{};
};

// How a sequence ended. error: for its readers, or null.
struct End {
    FinishReason reason;
    StopReason stop;
    std::exception_ptr error;
};

// With the exception that is being handled.
End error_end() noexcept;

// What the threads that read output wait for. All sequences of a session share it.
struct Signals {
    std::mutex mutex;
    std::condition_variable changed;
    std::int64_t unfinished = 0;  // sequences in slots and in the queue
};

// A request that waits or decodes. Readers use `output` alone, and may set `cancelled`.
class SequenceState {
   public:
    // The mutex of `signals` guards it.
    struct Output {
        std::deque<Event> events;  // that nobody has read yet
        std::optional<End> end;
        Stats stats;  // as of the last event
    };

    SequenceState(ResolvedRequest request, std::unique_ptr<TextReader> reader,
                  std::shared_ptr<Signals> signals);

    // Whether all tokens but the root are in the cache.
    bool prefilled() const { return cached == static_cast<std::int64_t>(tokens.size()) - 1; }
    std::int64_t written() const {
        return static_cast<std::int64_t>(tokens.size() - request.prompt_ids.size());
    }
    // Call it when the sequence gets a slot, or ends without one.
    void leave_queue();
    // Append the tokens of a pass, up to the stop or the limit that ends the sequence.
    void write(std::vector<Token> pass_tokens);
    // Text that was held back as a possible stop string is published first; if that fails, the
    // sequence ends with its error.
    void finish(End end) noexcept;

    const ResolvedRequest request;
    std::vector<std::int64_t> tokens;   // prompt and text; the last is the root, not yet cached
    std::int64_t cached = 0;            // how many of `tokens` have K/V in the cache
    std::int64_t admission_number = 0;  // the order in which sequences got slots, from 1
    std::atomic<bool> cancelled = false;
    bool finished = false;
    Stats stats;
    std::optional<CopyIndex> copies;
    std::optional<double> decoding_since;  // when its first pass began (`now`)
    double engine_seconds_before = 0.0;    // of the session, when its first pass began
    std::optional<Rates> rates;            // none until `auto` needs them
    std::optional<Processors> processors;
    std::exception_ptr processors_error;  // if not null, the sequence ends after the pass
    Output output;
    const std::shared_ptr<Signals> signals;

   private:
    void publish(Event event);

    std::optional<double> queued_since_ = now();
    std::unique_ptr<TextReader> reader_;
};

}  // namespace pass
