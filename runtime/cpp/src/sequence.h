// A request's state: what was asked for, what is written, and where its reader gets it from.
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

#include "acceptance.h"
#include "ngram.h"
#include "pass/event.hpp"
#include "pass/options.hpp"
#include "pass/stats.hpp"
#include "plan.h"
#include "text_reader.h"

namespace pass {

// Seconds on a clock that never goes back.
double now();

// What to generate; it never changes. cycle: the passes to decode with, none for whatever is fastest.
struct Work {
    std::vector<std::int64_t> prompt_ids;
    SamplingParams sampling;
    std::int64_t max_new_tokens = 0;
    std::optional<Cycle> cycle;
    int lookahead = 0;    // the most look-ahead drafts of a pass
    int text_drafts = 0;  // the most drafts from the text
    std::set<std::int64_t> stop_token_ids;
    bool reuse_prefix = false;
    std::optional<int> logprobs;
    std::string name = "ar";
};

// The last thing a reader gets. `error` is what to throw, where there is something.
struct End {
    FinishReason reason;
    StopReason stop;
    std::exception_ptr error;
};

// Between the thread that decodes and those that read: one for all sequences of a session.
struct Signals {
    std::mutex mutex;
    std::condition_variable changed;
};

// A request under way. The runner counts `cached`; everything a reader may know goes through `mail`.
class Sequence {
   public:
    // What the reader may look at, under the mutex of `signals`.
    struct Mail {
        std::deque<Event> events;
        std::optional<End> end;
        Stats stats;
    };

    Sequence(Work work, std::unique_ptr<TextReader> reader, std::shared_ptr<Signals> signals);

    // Whether the whole prompt but its last token is in the cache.
    bool prefilled() const { return cached == static_cast<std::int64_t>(tokens.size()) - 1; }
    // Tokens written so far.
    std::int64_t written() const { return static_cast<std::int64_t>(tokens.size() - work.prompt_ids.size()); }
    // It has a slot, or needs none any more.
    void leave_queue();
    // The tokens of a pass: up to a stop or the limit they are the sequence's, then it has ended.
    void write(std::vector<Token> pass_tokens);
    // Nothing comes after this, but for text that might have become a stop string.
    void finish(End end);

    const Work work;
    std::vector<std::int64_t> tokens;  // prompt and what was written; the last one is the root, not in the cache
    std::int64_t cached = 0;           // entries of the KV cache that are this sequence's
    std::atomic<bool> cancelled = false;
    bool finished = false;
    Stats stats;
    std::optional<NgramIndex> index;
    std::optional<double> decoding_since;  // when the first pass began
    double engine_before = 0.0;            // seconds that the engine had run by then, for all sequences before
    std::optional<Acceptance> acceptance;  // of look-ahead drafts in this sequence; none until `auto` asks
    Mail mail;
    const std::shared_ptr<Signals> signals;

   private:
    void tell(Event event);

    std::optional<double> queued_since_ = now();

    std::unique_ptr<TextReader> reader_;
};

}  // namespace pass
