// Continuous batching: a step admits sequences to free slots, reads prompt chunks, and runs one
// pass. As pass_runtime/decode/engine.py.
//
// A window is staged (written to the device) only if it differs from the one there. If a pass
// fails, all records stay as they were, and all windows are staged again from them.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/backend.h"
#include "backends/capabilities.h"
#include "decode/sequence.h"
#include "decode/slots.h"
#include "tuning/auto.h"

namespace pass {

// name: one of `make_plan`, or "auto". Throws Error if `draft` adds n-gram drafts to `ar`.
PlanChoice choose_plan(const std::string& name, int lookahead,
                       const std::optional<std::string>& draft, int longest_copy);

struct PromptChunk {
    std::int64_t tokens = 0;
    int width = 0;  // rows of its window
};

// The next chunk of `remaining` tokens, of at most `max_rows` rows: the widest window that they
// fill, or all of them if the narrowest window that holds them would be three quarters full.
PromptChunk next_chunk(const Capabilities& capabilities, std::int64_t cached,
                       std::int64_t remaining, std::int64_t capacity,
                       std::optional<std::int64_t> max_rows);

// `add` may be called from any thread, everything else from one thread at a time.
class Engine {
   public:
    // max_concurrency: if more sequences than this decode, all decode without drafts.
    Engine(Backend& backend, bool prefix_cache,
           std::optional<std::int64_t> max_concurrency = std::nullopt)
        : backend_(backend),
          slots_(backend, prefix_cache),
          auto_(backend.manifest().lookahead, backend.capabilities()),
          max_concurrency_(max_concurrency) {}

    Slots& slots() { return slots_; }
    // On the device; none if all must be staged again.
    const std::optional<Window>& staged_window() const { return staged_window_; }

    void add(std::shared_ptr<SequenceState> sequence);
    // Returns whether any sequences are left.
    bool step();
    // Finish every sequence with `end`, or as cancelled if it was cancelled.
    void end_all(const End& end) noexcept;

    // Times passes over `batch` masked slots if that was not done. Null if their windows do not fit
    // the KV cache beside the running sequences.
    Tuner* timed_tuner(Sampler sampler, int batch);
    // Captures the CUDA graphs of passes over `batch` masked slots, and of prompt chunks in the
    // slots that no smaller batch has. Does nothing while a slot has a sequence.
    void capture_graphs(std::int64_t capacity, int batch, const std::vector<Sampler>& samplers);

   private:
    struct Batch {
        std::vector<Slot*> slots;
        int size = 1;  // slots of the pass, from slot 0 on
        Sampler sampler = Sampler::greedy;
        std::vector<DraftState> states{};  // of each sequence; none if there are no drafts
        Tuner* tuner = nullptr;          // null: every request names a plan, or none was timed yet
        std::optional<Choice> choice{};  // the tuner's, if no request names a plan
        Plan plan = make_plan("ar", 0);
        Window window{};
        std::map<int, Drafts> drafts{};  // n-grams to put into the windows, by slot number
    };
    struct PassResult {
        std::vector<std::vector<Token>> tokens;  // of each sequence
        std::vector<Verified> verified;
        double seconds = 0;
    };

    void drop_cancelled();
    void admit();
    void read_prompts();
    std::int64_t prefill(Slot& slot, std::optional<std::int64_t> max_rows);
    void decode(std::vector<Slot*> slots);
    Batch batch_of(std::vector<Slot*> slots);
    Tuner* tuner_for(const Batch& batch);
    // Set window and drafts. Returns false if not even a plain pass fits.
    bool choose_window(Batch& batch);
    std::optional<Window> next_of_plan(const Batch& batch);
    std::optional<Window> verifying(const Batch& batch, const Window& next_of_plan);
    // The staged window if it is one of the plan's, or null.
    const Window* staged_of(const Batch& batch, const Plan& plan) const;
    bool fits(int width);
    PassResult run(const Batch& batch);
    void apply(const Batch& batch, PassResult result);
    void stage(const PassKind& kind, const std::map<int, Drafts>& drafts);
    void set_processors(const PassKind& kind, const std::vector<Slot*>& slots);
    void mask(Slot& slot);
    void stage_masked(const PassKind& kind);
    PassSeconds time_masked_pass(const PassKind& kind);
    void run_all_passes(std::int64_t max_kept, std::int64_t capacity, int batch,
                        const std::vector<Sampler>& samplers);
    // End the longest sequence, for which there is no room. The others go on.
    void end_longest(const std::vector<Slot*>& slots, const End& end);
    void finish(Slot& slot, const End& end) noexcept;
    std::shared_ptr<SequenceState> first_waiting() noexcept;

    Backend& backend_;
    Slots slots_;
    Auto auto_;
    std::optional<std::int64_t> max_concurrency_;
    std::optional<Window> staged_window_;
    Sampler sampler_ = Sampler::greedy;  // of the last pass
    double engine_seconds_ = 0.0;        // spent in passes, prefill included
    // Guards `waiting_`. Do not hold it while a sequence publishes, which locks the readers' mutex:
    // `add` is called with that mutex held, so both threads could wait for each other.
    std::mutex mutex_;
    std::deque<std::shared_ptr<SequenceState>> waiting_;
};

}  // namespace pass
