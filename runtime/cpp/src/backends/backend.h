// Runs a bundle's graphs over the slots of one device. The base class fills the buffers, a subclass
// runs the graphs.
//
// The runner (decode/runner.h) tracks which sequence is in which slot, and how much of it is
// cached; a backend does not. All inputs of a pass are in the buffers (written here, or by the
// graphs of the previous pass) or in the KV cache. The backend keeps a host copy of the cached
// lengths, to fill the noise (random numbers for sampling), and to move the K/V of accepted rows
// next to each other.
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
#include "bundle/open_files.h"
#include "bundle/plan.h"

namespace pass {

// What a pass runs: a plan over the first `batch` slots, and the graphs that follow the trunk.
struct PassKind {
    Plan plan;
    int batch = 1;
    Sampler sampler = Sampler::greedy;
    bool logprobs = false;
    // The length T of the token lists in `ProcessedRows`; 0 runs no logits processors.
    std::size_t touched_count = 0;
};

// What the logits processors (tails/processors.py) do to a slot with P root and draft rows.
struct ProcessedRows {
    // [P,V/8 rounded up] Bit i % 8 of number i / 8 is set if token i may be drawn.
    std::vector<std::int32_t> allowed;
    std::vector<std::int64_t> touched;  // [T] ids of the tokens that the next three fields change
    std::vector<float> bias;            // [T] is added to the logits of these tokens
    std::vector<float> factor;          // [P,T] then divides positive and multiplies negative ones
    std::vector<float> penalty;         // [P,T] is then subtracted
};

// The tokens that a pass emitted in one slot, and the window row that each was drawn from.
struct Emitted {
    std::vector<std::int64_t> tokens, rows;
};

// Log-probabilities of a pass over b slots that emits up to E tokens in each: `chosen` [b,E] of the
// emitted tokens, and `values` [b,E,K] of the K likeliest tokens `ids` [b,E,K] at their positions.
struct Logprobs {
    std::size_t max_emitted = 0;  // E
    std::size_t top = 0;          // K
    std::vector<float> chosen;
    std::vector<std::int64_t> ids;
    std::vector<float> values;
};

// A bundle on one device, with slots 0 .. capabilities().slots()-1.
class Backend {
   public:
    // files: the graphs or engines, and their data.
    Backend(const Manifest& manifest, Capabilities capabilities, std::unique_ptr<Memory> memory,
            OpenFiles files = {});
    virtual ~Backend() = default;
    Backend(const Backend&) = delete;
    Backend& operator=(const Backend&) = delete;

    const Manifest& manifest() const { return manifest_; }
    const Capabilities& capabilities() const { return capabilities_; }
    // The present KV capacity, in tokens.
    virtual std::int64_t capacity() const { return cache_.capacity(); }

    // The KV cache of all slots. Only this class's `resize` may change its capacity.
    KVCache& cache() { return cache_; }
    Memory& memory() { return *memory_; }

    // Makes the device current for the calling thread as long as the result lives. A thread must
    // hold the result while it calls other methods.
    std::shared_ptr<void> for_this_thread() { return memory_->for_this_thread(); }
    // The graph files or passes that could not be captured as CUDA graphs, each with the reason.
    const std::map<std::string, std::string>& uncaptured() const { return uncaptured_; }
    // The error after which this backend no longer works, as the device is lost or a file was
    // written; else null.
    std::exception_ptr failure() const {
        const std::exception_ptr lost = memory_->failure();
        return lost != nullptr ? lost : files_.failure();
    }

    // Change the KV capacity to `capacity` tokens, keeping the first lengths[slot] entries of every
    // slot. If it throws, nothing has changed.
    virtual void resize(std::int64_t capacity, std::span<const std::int64_t> lengths);
    // Set how the tokens of `slot` are sampled.
    void set_sampling(int slot, const SamplingParams& params);
    // Leave `slot` out of the following passes. They may overwrite its K/V after the first `length`
    // entries, and nothing else.
    void mask(int slot, std::int64_t length);
    // Write the window of `plan` for `slot`, whose cache holds `length` entries. `drafts` are a
    // chain. Other draft rows get the id V (the vocabulary size), which no sampled token equals.
    void stage(int slot, const Plan& plan, std::int64_t length, std::int64_t root,
               std::span<const std::int64_t> drafts = {});
    // The drafts in the staged windows of the first `batch` slots; V stands for no draft.
    std::vector<std::vector<std::int64_t>> drafts(const Plan& plan, int batch);
    // Set what the logits processors do to `slot` in the next pass.
    void set_processors(int slot, const ProcessedRows& rows);
    // Write the K/V of `tokens` after the first `length` entries of `slot`, in a window that is
    // padded to `width` rows.
    void prefill(int slot, std::int64_t length, std::span<const std::int64_t> tokens, int width);
    // Run one pass, trunk and tail, over the staged windows, and return what each slot emitted; a
    // masked slot emits nothing. Afterwards the K/V of the accepted rows are part of the cache, and
    // the windows of `kind.plan.next()` are staged.
    std::vector<Emitted> run(const PassKind& kind);
    // The log-probabilities of the tokens that the last pass, of this `kind`, emitted.
    Logprobs logprobs(const PassKind& kind);

    // Run the trunk alone over the staged windows. It writes logits and K/V.
    virtual void run_trunk(const Plan& plan, int batch) = 0;
    // Run the tail alone, on the logits that the last `run_trunk` wrote.
    virtual void run_tail(const PassKind& kind) = 0;

   protected:
    // What the tail of a pass over B slots wrote. Slot b emitted the first count[b] of the E tokens
    // emitted[b], drawn from the window rows emitted_rows[b]. If the drafts are a chain,
    // `emitted_rows` is empty: token i is drawn from row i.
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
    OpenFiles files_;
    BundleBindings bindings_;
    Buffers buffers_;
    KVCache cache_;
    std::map<std::string, std::string> uncaptured_;

   private:
    void set_slot(int slot, std::int64_t length, bool active);

    NoiseRows noise_;
    // The cached length of each slot, as the device has it; none for masked slots.
    std::vector<std::optional<std::int64_t>> lengths_;
};

}  // namespace pass
