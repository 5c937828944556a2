// The graphs of a bundle over the slots of one device. The base class fills the buffers, a subclass runs the graphs.
//
// A backend knows nothing of sequences: the runner records which one is in a slot, and how much of it is cached. All
// that a pass needs is in the buffers (written here, or by the graphs of the pass before) and in the KV cache. The
// lengths that are kept here are those on the device; they only say which random numbers a slot needs next.
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

// A pass: its plan, over the first `batch` slots, and the graphs that follow the trunk.
struct PassKind {
    Plan plan;
    int batch = 1;
    Sampler sampler = Sampler::greedy;
    bool logprobs = false;
    std::size_t num_biased = 0;  // the length of the lists that the logits processors read; 0 if there are none
};

// What the logits processors do to one slot: P rows, lists of T tokens (pass_exporter/tails/processors.py).
struct ProcessedRows {
    std::vector<std::int32_t> allowed;     // [P,V/8] bits in bytes
    std::vector<std::int64_t> biased_ids;  // [T]
    std::vector<float> bias;               // [T]
    std::vector<float> factor;             // [P,T]
    std::vector<float> penalty;            // [P,T]
};

// What a pass emitted for one slot: tokens, and the rows of the window that they were drawn from.
struct Emitted {
    std::vector<std::int64_t> tokens, rows;
};

// Log-probabilities of the emitted tokens, `chosen` [b,E], and of the most likely tokens: `ids` and `values` [b,E,K].
struct Logprobs {
    std::size_t emitted = 0, most = 0;  // E, K
    std::vector<float> chosen;
    std::vector<std::int64_t> ids;
    std::vector<float> values;
};

// A bundle on a device, with the slots 0 .. capabilities().slots()-1.
class Backend {
   public:
    // spare_entries: as DerivedTrunk has them.
    Backend(const Manifest& manifest, Capabilities capabilities, std::unique_ptr<Memory> memory,
            std::int64_t spare_entries = 0);
    virtual ~Backend() = default;
    Backend(const Backend&) = delete;
    Backend& operator=(const Backend&) = delete;

    const Manifest& manifest() const { return manifest_; }
    const Capabilities& capabilities() const { return capabilities_; }
    // The present KV capacity in tokens.
    virtual std::int64_t capacity() const { return cache_.capacity(); }

    // The KV cache of all slots; only `resize` may change its capacity.
    KVCache& cache() { return cache_; }
    Memory& memory() { return *memory_; }

    // To be held while a thread calls any other method.
    std::shared_ptr<void> for_this_thread() { return memory_->for_this_thread(); }
    // What runs without a CUDA graph although the device has them, and why.
    const std::map<std::string, std::string>& uncaptured() const { return uncaptured_; }
    // The error that the device was lost with, null while it works.
    std::exception_ptr failure() const { return memory_->failure(); }

    // Make room for `capacity` tokens in every slot, keeping the first lengths[slot] of each. All or nothing.
    virtual void resize(std::int64_t capacity, std::span<const std::int64_t> lengths);
    // Set how the tokens of `slot` are sampled.
    void set_sampling(int slot, const SamplingParams& params);
    // Mask `slot`: the next passes emit nothing for it, and change nothing of its KV cache up to `length`.
    void mask(int slot, std::int64_t length);
    // Stage the window of `plan` in `slot`, after `length` cached tokens. `drafts` are a chain. A draft row without a
    // draft gets the id V, which equals no token.
    void stage(int slot, const Plan& plan, std::int64_t length, std::int64_t root,
               std::span<const std::int64_t> drafts = {});
    // The drafts in the staged windows of `plan`, for the first `batch` slots; V stands for none.
    std::vector<std::vector<std::int64_t>> drafts(const Plan& plan, int batch);
    // Set what the logits processors do to `slot` in the next pass.
    void process(int slot, const ProcessedRows& rows);
    // Write the K/V of `tokens` into `slot` after its first `length` tokens, by a window of `width` rows. Rows beyond
    // the tokens are padding.
    void prefill(int slot, std::int64_t length, std::span<const std::int64_t> tokens, int width);
    // One pass, trunk and tail, over the staged windows. Returns what was emitted for each slot, nothing for a masked
    // one. The K/V of accepted rows are then part of the cache, and the windows of `kind.plan.next()` are staged.
    std::vector<Emitted> run(const PassKind& kind);
    // Log-probabilities of the tokens that the last pass emitted, which must have been of this `kind`.
    Logprobs logprobs(const PassKind& kind);

    // The trunk alone over the staged windows: writes logits and K/V, and leaves the windows as they are.
    virtual void run_trunk(const Plan& plan, int batch) = 0;
    // The tail alone, on the logits that the trunk wrote.
    virtual void run_tail(const PassKind& kind) = 0;

   protected:
    // What a pass over b slots emitted: `count` [b], of the tokens `emitted` [b,E], which were drawn from the rows
    // `emitted_rows` [b,E]; these are empty if the drafts are a chain.
    struct PassResult {
        std::vector<std::int64_t> count, emitted, emitted_rows;
    };

    // The graph of logits processors. Throws Error if the bundle has none.
    const Graph& processors() const;
    // Runs trunk and tail; returns what they emitted, in host memory.
    virtual PassResult run_pass(const PassKind& kind);
    // The trunk over the prefill window, on the KV cache of `slot`; only the K/V that it writes matter.
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
    // Fill the noise rows of `slot` for every position that a pass of `plan` may draw at.
    void cover_noise(int slot, const Plan& plan);

    NoiseRows noise_;
    std::vector<std::optional<std::int64_t>> lengths_;  // as the device has them; none for a masked slot
};

}  // namespace pass
