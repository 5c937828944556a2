// Runs passes over the sequences in a backend's slots, and prefills their prompts.
//
// A window is staged (written to the device) only if it differs from the one there. If a pass
// fails, the records of slots and sequences stay as they were before, and all windows are staged
// again from these records.
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

// The next chunk of a prompt with `cached` tokens in the cache and `remaining` tokens left, in a
// window of at most `max_rows` rows. capacity: the present KV capacity. If the narrowest window
// that holds all remaining tokens would be three quarters full, or if they could fill only a window
// of a single row, the chunk is all of them: its padding takes less time than more chunks.
// Otherwise the chunk is the widest window that they fill.
PromptChunk next_chunk(const Capabilities& capabilities, std::int64_t cached,
                       std::int64_t remaining, std::int64_t capacity,
                       std::optional<std::int64_t> max_rows);

// What a pass did for the sequence of one slot.
struct SlotResult {
    std::shared_ptr<SequenceState> sequence;
    int drafted = 0;  // how many drafts followed one another in its window (a tree's depth)
    TokenSource source = TokenSource::lookahead;  // of the drafts
    // how many drafts were accepted before the first one that was a second or later choice
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

    // Prefill one chunk of the prompt, of at most `max_rows` rows. Returns how many tokens it has.
    std::int64_t prefill(Slot& slot, std::optional<std::int64_t> max_rows);
    // Run one pass over every decoding slot. Call `Slots::make_room` first. drafts: by slot number,
    // the n-gram drafts that replace the drafts in the slot's window. Returns the result of each
    // sequence, and the seconds of the pass.
    std::pair<std::vector<SlotResult>, double> run(const Plan& plan,
                                                   const std::map<int, Drafts>& drafts);
    // Run a pass with every slot masked, which changes no sequence. Returns its seconds.
    PassSeconds time_masked_pass(const PassKind& kind);
    // Capture the CUDA graphs of passes before requests need them, because the first runs of a pass
    // take far longer than later ones. The passes are those of `ar`, `two-pass` and `fused` over
    // `batch` masked slots at this KV capacity, and prompt chunks in the slots that no smaller
    // batch has. Does nothing while any slot has a sequence, and leaves out passes for which there
    // is no room after the tokens that free slots keep.
    void capture_graphs(std::int64_t capacity, int batch, const std::vector<Sampler>& samplers);
    // The batch size of a pass over the slots `active`.
    int batch(const std::vector<Slot*>& active) const;
    // The cheapest sampler that serves all of `active`.
    static Sampler sampler(const std::vector<Slot*>& active);

   private:
    void stage(const PassKind& kind, const std::map<int, Drafts>& drafts);
    // Set what the logits processors do in the next pass, whose windows are staged already.
    void set_processors(const PassKind& kind, const std::vector<Slot*>& active);
    void mask(Slot& slot);
    void record(Slot& slot, const SlotResult& result, int next_drafts) noexcept;
    void stage_masked(const PassKind& kind);
    // max_kept: how many tokens the slot with the most kept tokens keeps.
    void run_all_passes(std::int64_t max_kept, std::int64_t capacity, int batch,
                        const std::vector<Sampler>& samplers);

    Backend& backend_;
    Slots slots_;
    std::optional<Plan> staged_plan_;
    Sampler sampler_ = Sampler::greedy;  // of the last pass
    double engine_seconds_ = 0.0;        // spent in passes, prefill included
};

}  // namespace pass
