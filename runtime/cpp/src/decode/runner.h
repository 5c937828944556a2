// Runs passes over the sequences in the slots of a backend, and reads their prompts.
//
// Only changes are written to the device. If a pass fails, the records of slots and sequences stay as they were before
// it, and the windows are written again from them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "backends/backend.h"
#include "backends/capabilities.h"
#include "decode/draft_policy.h"
#include "decode/sequence.h"
#include "decode/slots.h"
#include "tuning/estimates.h"

namespace pass {

// The next tokens of a prompt, and the rows of the window that reads them.
struct PromptChunk {
    std::int64_t tokens = 0;
    int width = 0;
};

// The next chunk of a prompt of which `remaining` tokens are left, after `cached` tokens, in a window of at most `most`
// rows. capacity: the KV capacity as it is now. It is the narrowest window that holds all that is left, if that fills
// three quarters of it or fills no other; else the widest that is filled.
PromptChunk next_chunk(const Capabilities& sizes, std::int64_t cached, std::int64_t remaining, std::int64_t capacity,
                       std::optional<std::int64_t> most);

// What a pass did for one sequence: its window held drafts from `source`, `drafted` one after another, and the pass
// emitted `tokens`.
struct StepResult {
    std::shared_ptr<SequenceState> sequence;
    int drafted = 0;
    TokenSource source = TokenSource::lookahead;
    int chain = 0;  // of the accepted drafts, how many from the first on were first choices; others are of a tree
    int last = 0;   // the row of the last accepted draft
    std::vector<Token> tokens;
};

// The result for `sequence` in `slot`, whose window held `drafted` drafts from `source`. logprobs: of the whole pass;
// null if it has none. Changes nothing.
StepResult step_result_of(const std::shared_ptr<SequenceState>& sequence, std::size_t slot, int drafted,
                          TokenSource source, const Emitted& emitted, const Logprobs* logprobs);

// Not thread-safe: the scheduler calls it from one thread at a time.
class Runner {
   public:
    Runner(Backend& backend, bool prefix_cache) : backend_(backend), slots_(backend, prefix_cache) {}

    Backend& backend() { return backend_; }
    Slots& slots() { return slots_; }
    // The plan whose windows are on the device; none if they must be written again.
    const std::optional<Plan>& window() const { return window_; }

    // Read one chunk of the prompt, in a window of at most `most` rows; returns the number of its tokens.
    std::int64_t prefill(Slot& slot, std::optional<std::int64_t> most);
    // One pass over every decoding slot; `Slots::make_room` must have been called. drafts: n-gram drafts by slot
    // number, which replace those in the slot's window. Returns what the pass did for each sequence, and its seconds.
    std::pair<std::vector<StepResult>, double> run(const Plan& plan, const std::map<int, Drafts>& drafts);
    // Time a pass with every slot masked, which changes no sequence: the seconds of its trunk and its tail.
    PassSeconds idle_pass(const PassKind& kind);
    // Run what an engine repeats as captured CUDA graphs, before requests need it: running a pass for the first time
    // and capturing it take far longer than repeating it. It runs the passes of every mode over `batch` slots with a KV
    // capacity of so many tokens, every slot masked, and the chunks of prompts of the slots that no smaller batch has.
    // It does nothing while a sequence runs, and leaves out what has no room after the tokens that free slots keep.
    void capture_graphs(std::int64_t capacity, int batch, const std::vector<Sampler>& samplers);
    // The batch size of a pass over the slots `active`.
    int batch(const std::vector<Slot*>& active) const;
    // The cheapest sampler that serves all of `active`: a later sampler also computes what the earlier ones do.
    static Sampler sampler(const std::vector<Slot*>& active);

   private:
    void lay_out(const PassKind& kind, const std::map<int, Drafts>& drafts);
    // Set what the logits processors do in a pass whose windows are staged.
    void process(const PassKind& kind, const std::vector<Slot*>& active);
    void mask(Slot& slot);
    void count(Slot& slot, const StepResult& result, int next_drafts) noexcept;
    void stage_masked(const PassKind& kind);
    void run_everything(std::int64_t kept, std::int64_t capacity, int batch, const std::vector<Sampler>& samplers);

    Backend& backend_;
    Slots slots_;
    std::optional<Plan> window_;
    Sampler sampler_ = Sampler::greedy;  // the one of the last pass
    double engine_seconds_ = 0.0;        // spent in passes, over prompts too
};

}  // namespace pass
