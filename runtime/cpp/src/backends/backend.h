// Runs a bundle's graphs over the slots of one device. The base class fills the buffers, a subclass
// runs the graphs.
//
// The runner tracks which sequence is in which slot, and how much of it is cached. All inputs of a
// pass are in the KV cache or in buffers that are written here or by the graphs of the previous
// pass. The backend keeps a host copy of the cached lengths, to fill the noise (random numbers of
// sampling) and to move the K/V of accepted rows next to each other.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "backends/buffers.h"
#include "backends/capabilities.h"
#include "backends/kv_cache.h"
#include "backends/memory.h"
#include "bundle/bindings.h"
#include "bundle/manifest.h"
#include "bundle/plan.h"

namespace pass {

// What a pass runs: a plan over the first `batch` slots, and the graphs that follow the trunk.
struct PassKind {
    Plan plan;
    int batch = 1;
    Sampler sampler = Sampler::greedy;
    bool logprobs = false;
    std::size_t touched_count = 0;  // T of `ProcessedRows` below; 0: no logits processors run
};

// What the logits processors do to a slot with P root and draft rows (tails/processors.py).
struct ProcessedRows {
    std::vector<std::int32_t> allowed;  // [P,V/8] bits of allowed tokens, a byte in each number
    std::vector<std::int64_t> touched;  // [T] the tokens that the next three fields change
    std::vector<float> bias;            // [T] added to the logits of these tokens
    std::vector<float> factor;          // [P,T] then divides positive, multiplies negative logits
    std::vector<float> penalty;         // [P,T] then subtracted
};

// The tokens that a pass emitted in one slot, and the window row that each was drawn from.
struct Emitted {
    std::vector<std::int64_t> tokens, rows;
};

// Log-probabilities of a pass over b slots: `chosen` [b,E] of the emitted tokens, and `values`
// [b,E,K] of the K most likely tokens `ids` [b,E,K] at the same positions.
struct Logprobs {
    std::size_t max_emitted = 0;  // E, the most tokens that the pass emits in a slot
    std::size_t top = 0;          // K
    std::vector<float> chosen;
    std::vector<std::int64_t> ids;
    std::vector<float> values;
};

// Slots 0 .. capabilities().slots()-1 of one bundle on one device.
class Backend {
   public:
    // spare_entries: how many cache entries a pass may overwrite after its window, as padding.
    Backend(const Manifest& manifest, Capabilities capabilities, std::unique_ptr<Memory> memory,
            std::int64_t spare_entries = 0);
    virtual ~Backend() = default;
    Backend(const Backend&) = delete;
    Backend& operator=(const Backend&) = delete;

    const Manifest& manifest() const { return manifest_; }
    const Capabilities& capabilities() const { return capabilities_; }
    // The present KV capacity, in tokens.
    virtual std::int64_t capacity() const { return cache_.capacity(); }

    // The KV cache of all slots; only `resize` may change its capacity.
    KVCache& cache() { return cache_; }
    Memory& memory() { return *memory_; }

    // Makes the device current for the calling thread as long as the result lives. Hold the result
    // while you call other methods.
    std::shared_ptr<void> for_this_thread() { return memory_->for_this_thread(); }
    // By name of a graph file or a pass, why it could not be captured as a CUDA graph.
    const std::map<std::string, std::string>& uncaptured() const { return uncaptured_; }
    // The error with which the device was lost; null while it works.
    std::exception_ptr failure() const { return memory_->failure(); }

    // Change the KV capacity, keeping lengths[slot] entries of every slot. If it throws, all stays.
    virtual void resize(std::int64_t capacity, std::span<const std::int64_t> lengths);
    // Set how the tokens of `slot` are sampled.
    void set_sampling(int slot, const SamplingParams& params);
    // Leave `slot` out of the next passes, which may overwrite its K/V only after `length` entries.
    void mask(int slot, std::int64_t length);
    // Write the window of `plan` for `slot`, whose cache holds `length` entries. `drafts` are a
    // chain. A draft row without a draft gets the id V (the vocabulary size), which is no token.
    void stage(int slot, const Plan& plan, std::int64_t length, std::int64_t root,
               std::span<const std::int64_t> drafts = {});
    // The drafts in the staged windows of `plan`, by slot. The id V stands for no draft.
    std::vector<std::vector<std::int64_t>> drafts(const Plan& plan, int batch);
    // Set what the logits processors do to `slot` in the next pass.
    void set_processors(int slot, const ProcessedRows& rows);
    // Append the K/V of `tokens` to the `length` entries of `slot`, in a window of `width` rows.
    void prefill(int slot, std::int64_t length, std::span<const std::int64_t> tokens, int width);
    // Run one pass, trunk and tail, over the staged windows. Returns what each slot emitted,
    // nothing if it is masked. The K/V of the accepted rows are then part of the cache, and the
    // windows of `kind.plan.next()` are staged.
    std::vector<Emitted> run(const PassKind& kind);
    // The log-probabilities of the tokens that the last pass emitted. kind: of that pass.
    Logprobs logprobs(const PassKind& kind);

    // Run the trunk alone over the staged windows: it writes logits and K/V, but no window.
    virtual void run_trunk(const Plan& plan, int batch) = 0;
    // Run the tail alone, on the logits that the last `run_trunk` wrote.
    virtual void run_tail(const PassKind& kind) = 0;

   protected:
    // What a pass over B slots emitted: in slot b, the first count[b] of the tokens `emitted`
    // [B,E], drawn from the window rows `emitted_rows` [B,E] (empty if the drafts are a chain).
    struct PassResult {
        std::vector<std::int64_t> count, emitted, emitted_rows;
    };

    // The graph of logits processors. Throws Error if the bundle has none.
    const Graph& processors() const;
    // Run trunk and tail.
    virtual PassResult run_pass(const PassKind& kind);
    // Run the trunk over the prefill window on the cache of `slot`. Only its K/V are used.
    virtual void run_prefill(int slot, const Plan& plan) = 0;

    const Manifest& manifest_;
    Capabilities capabilities_;
    std::unique_ptr<Memory> memory_;
    BundleBindings bindings_;
    Buffers buffers_;
    KVCache cache_;
    std::map<std::string, std::string> uncaptured_;

   private:
    void set_slot(int slot, std::int64_t length, bool active);
    // Fill the noise of `slot` up to the last position that a window of `plan` can reach.
    void cover_noise(int slot, const Plan& plan);

    NoiseRows noise_;
    std::vector<std::optional<std::int64_t>> lengths_;  // cached entries by slot; none if masked
};

}  // namespace pass
