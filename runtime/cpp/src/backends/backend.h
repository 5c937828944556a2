// Runs a bundle's graphs over the slots of one device. The base class fills the buffers, a subclass
// runs the graphs. The engine (decode/engine.h) knows which sequence is in which slot.
#pragma once

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
#include "bundle/window.h"

namespace pass {

// What a pass runs, in the first `batch` slots.
struct PassKind {
    Window window;
    int batch = 1;
    Sampler sampler = Sampler::greedy;
    bool logprobs = false;
    std::size_t touched_count = 0;  // T of `ProcessedRows`; 0 runs no logits processors
};

// What the logits processors do to a slot with P root and draft rows.
struct ProcessedRows {
    // [P,V/8 rounded up] Bit i % 8 of number i / 8 is set if token i may be drawn.
    std::vector<std::int32_t> allowed;
    std::vector<std::int64_t> touched;  // [T] ids of the tokens that the next three fields change
    std::vector<float> bias;            // [T] is added to the logits of these tokens
    std::vector<float> factor;          // [P,T] then divides positive and multiplies negative ones
    std::vector<float> penalty;         // [P,T] is then subtracted
};

// Of a pass over b slots that emits up to E tokens in each: `chosen` [b,E] of the emitted tokens,
// and `values` [b,E,K] of the K likeliest tokens `ids` [b,E,K] in their places.
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
    // In tokens.
    virtual std::int64_t capacity() const { return cache_.capacity(); }

    // Only `resize` may change its capacity.
    KVCache& cache() { return cache_; }
    Memory& memory() { return *memory_; }

    // A thread must hold the result while it calls other methods.
    std::shared_ptr<void> for_this_thread() { return memory_->for_this_thread(); }
    // The graph files or passes that could not be captured as CUDA graphs, each with the reason.
    const std::map<std::string, std::string>& uncaptured() const { return uncaptured_; }
    // After which the backend no longer works: the device is lost, or a file was written.
    std::exception_ptr failure() const {
        const std::exception_ptr lost = memory_->failure();
        return lost != nullptr ? lost : files_.failure();
    }

    // Keeps the first lengths[slot] entries of every slot. If it throws, nothing has changed.
    virtual void resize(std::int64_t capacity, std::span<const std::int64_t> lengths);
    void set_sampling(int slot, const SamplingParams& params);
    // Leave it out of the following passes. They may overwrite its K/V after `length` entries.
    void mask(int slot, std::int64_t length);
    // Draft rows without a draft get the id V (the vocabulary size), which no sampled token equals.
    void stage(int slot, const Window& window, std::int64_t length, std::int64_t root,
               std::span<const std::int64_t> drafts = {});
    // The drafts in the staged windows of the first `batch` slots; V stands for no draft.
    std::vector<std::vector<std::int64_t>> drafts(const Window& window, int batch);
    // For the next pass.
    void set_processors(int slot, const ProcessedRows& rows);
    // Write the K/V of `tokens` after the first `length` entries of `slot`, in a window that is
    // padded to `width` rows.
    void prefill(int slot, std::int64_t length, std::span<const std::int64_t> tokens, int width);
    // Run one pass over the staged windows. Returns the tokens that each slot emitted, none if it
    // is masked. Their K/V are then in the cache, and the windows `next` are staged.
    std::vector<std::vector<std::int64_t>> run(const PassKind& kind);
    // Of the tokens that the last pass, of this `kind`, emitted.
    Logprobs logprobs(const PassKind& kind);

    // The trunk alone, over the staged windows.
    virtual void run_trunk(const Window& window, int batch) = 0;
    // The tail alone, on the logits that the last `run_trunk` wrote.
    virtual void run_tail(const PassKind& kind) = 0;

   protected:
    // Slot b emitted the first count[b] of the E tokens emitted[b].
    struct PassResult {
        std::vector<std::int64_t> count, emitted;
    };

    // Run trunk and tail.
    virtual PassResult run_pass(const PassKind& kind);
    virtual void run_prefill(int slot, const Window& window) = 0;

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
