// The state of one request: the request itself, the tokens so far, and the output for its reader.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "bundle/plan.h"
#include "decode/ngram.h"
#include "decode/processors.h"
#include "pass/event.hpp"
#include "pass/options.hpp"
#include "text/text_reader.h"
#include "tuning/estimates.h"

namespace pass {

// Seconds of a monotonic clock.
double now();

// A request with every default filled in; it never changes. cycle: the plans to decode with, none for the fastest.
struct ResolvedRequest {
    std::vector<std::int64_t> prompt_ids;
    SamplingParams sampling;
    std::int64_t max_new_tokens = 0;
    std::optional<Cycle> cycle;
    int lookahead = 0;     // the most look-ahead drafts of a pass
    int ngram_drafts = 0;  // the most n-gram drafts of a pass
    std::set<std::int64_t> stop_token_ids;
    bool reuse_prefix = false;
    std::string cache_salt{};  // K/V are shared among requests with the same one
    std::optional<int> logprobs;
    std::string name = "ar";
    std::optional<Processing> processing{};
};

// How a sequence ended, which its reader gets last. error: what the reader throws, null if nothing failed.
struct End {
    FinishReason reason;
    StopReason stop;
    std::exception_ptr error;
};

// What readers wait on, shared by all sequences of a session.
struct Signals {
    std::mutex mutex;
    std::condition_variable changed;
    std::int64_t unfinished = 0;  // sequences that have a place in slots and queue, which they keep to their end
};

// A request that is waiting or decoded. The runner counts `cached`; readers see `output` alone.
class SequenceState {
   public:
    // What the reader sees, under the mutex of `signals`.
    struct Output {
        std::deque<Event> events;
        std::optional<End> end;
        Stats stats;
    };

    SequenceState(ResolvedRequest request, std::unique_ptr<TextReader> reader, std::shared_ptr<Signals> signals);

    // Whether the whole prompt but its last token is in the cache.
    bool prefilled() const { return cached == static_cast<std::int64_t>(tokens.size()) - 1; }
    // Tokens written so far.
    std::int64_t written() const { return static_cast<std::int64_t>(tokens.size() - request.prompt_ids.size()); }
    // It was given a slot, or ended without one.
    void leave_queue();
    // Append the tokens of a pass, up to a stop or the limit, which end the sequence.
    void write(std::vector<Token> pass_tokens);
    // End the sequence. Text that was held back, because it might have become a stop string, is published first.
    void finish(End end);

    const ResolvedRequest request;
    std::vector<std::int64_t> tokens;  // prompt and written tokens; the last one is the root, which is not cached yet
    std::int64_t cached = 0;           // how many of them are in the KV cache
    std::int64_t admitted = 0;         // its number in the order in which sequences got their slots
    std::atomic<bool> cancelled = false;
    bool finished = false;
    Stats stats;
    std::optional<NgramIndex> index;
    std::optional<double> decoding_since;  // when the first pass began
    double engine_before = 0.0;            // the engine's seconds by then, over all sequences
    std::optional<Acceptance> acceptance;  // of this sequence's look-ahead drafts; none until `auto` needs it
    std::map<int, Acceptance> ngrams;      // of its n-gram drafts, by the length of the match
    std::optional<Processors> processors;
    std::exception_ptr problem;  // why its processors cannot go on, once they cannot: it ends with the pass
    Output output;
    const std::shared_ptr<Signals> signals;

   private:
    void publish(Event event);

    std::optional<double> queued_since_ = now();

    std::unique_ptr<TextReader> reader_;
};

}  // namespace pass
