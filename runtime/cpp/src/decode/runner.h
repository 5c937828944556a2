// Runs passes over the sequences in a backend's slots, and prefills their prompts.
//
// Only what changed is written to the device. If a pass fails, the records of slots and sequences
// stay as they were before, and all windows are staged again from them.
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

// The prompt tokens of the next chunk, and the rows of its window.
struct PromptChunk {
    std::int64_t tokens = 0;
    int width = 0;
};

// The next chunk of a prompt of which `remaining` tokens are left, after `cached` tokens, in a
// window of at most `max_rows` rows. capacity: the present KV capacity. The window is the narrowest
// that holds all of these, if they fill three quarters of it or could otherwise fill only windows
// of one row. Otherwise it is the widest that they fill.
PromptChunk next_chunk(const Capabilities& capabilities, std::int64_t cached,
                       std::int64_t remaining, std::int64_t capacity,
                       std::optional<std::int64_t> max_rows);

// What a pass did for one sequence.
struct StepResult {
    std::shared_ptr<SequenceState> sequence;
    int drafted = 0;                              // drafts in its window; of a tree, its depth
    TokenSource source = TokenSource::lookahead;  // of the drafts
    // accepted drafts that are first choices, before the first other choice of a tree
    int accepted_first_choices = 0;
    int last_row = 0;  // the row of the last accepted draft
    std::vector<Token> tokens;
};

// Not thread-safe: the scheduler calls it from one thread at a time.
class Runner {
   public:
    Runner(Backend& backend, bool prefix_cache)
        : backend_(backend), slots_(backend, prefix_cache) {}

    Backend& backend() { return backend_; }
    Slots& slots() { return slots_; }
    // The plan whose windows are on the device; none if all windows must be staged again.
    const std::optional<Plan>& staged_plan() const { return staged_plan_; }

    // Prefill one chunk of the prompt, of at most `max_rows` rows. Returns its number of tokens.
    std::int64_t prefill(Slot& slot, std::optional<std::int64_t> max_rows);
    // Run one pass over every decoding slot; `Slots::make_room` comes first. drafts: by slot
    // number, the n-gram drafts that replace those in its window. Returns the result of each
    // sequence, and the seconds of the pass.
    std::pair<std::vector<StepResult>, double> run(const Plan& plan,
                                                   const std::map<int, Drafts>& drafts);
    // Seconds of trunk and tail in a pass with every slot masked, which changes no sequence.
    PassSeconds time_masked_pass(const PassKind& kind);
    // Run passes before requests need them, on an engine that captures CUDA graphs, because the
    // first runs of a pass take far longer than later ones: those of `ar`, `two-pass` and `fused`
    // over `batch` slots, all masked, at this KV capacity, and prompt chunks in the slots that no
    // smaller batch has. Does nothing while a sequence runs, and leaves out passes that have no
    // room after the tokens that free slots keep.
    void capture_graphs(std::int64_t capacity, int batch, const std::vector<Sampler>& samplers);
    // The batch size of a pass over the slots `active`.
    int batch(const std::vector<Slot*>& active) const;
    // The cheapest sampler that serves all of `active`.
    static Sampler sampler(const std::vector<Slot*>& active);

   private:
    void stage(const PassKind& kind, const std::map<int, Drafts>& drafts);
    // Set what the logits processors do in a pass whose windows are staged.
    void set_processors(const PassKind& kind, const std::vector<Slot*>& active);
    void mask(Slot& slot);
    void record(Slot& slot, const StepResult& result, int next_drafts) noexcept;
    void stage_masked(const PassKind& kind);
    // kept: the most tokens that a slot keeps.
    void run_all_passes(std::int64_t kept, std::int64_t capacity, int batch,
                        const std::vector<Sampler>& samplers);

    Backend& backend_;
    Slots slots_;
    std::optional<Plan> staged_plan_;
    Sampler sampler_ = Sampler::greedy;  // of the last pass
    double engine_seconds_ = 0.0;        // spent in passes, prefill included
};

}  // namespace pass
