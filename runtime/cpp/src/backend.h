// A bundle's graphs over the slots of one device. The base class fills the buffers, a subclass runs the graphs.
//
// A backend keeps no account of sequences: what is in a slot, and how far, the runner knows. Everything that a pass
// needs is either in the buffers (written here, or by the graphs of the pass before) or in the KV cache.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "bindings.h"
#include "buffers.h"
#include "capabilities.h"
#include "kv_cache.h"
#include "manifest.h"
#include "memory.h"
#include "plan.h"

namespace pass {

// What is run: a plan over the first `batch` slots, and which graphs follow the trunk.
struct PassKind {
    Plan plan;
    int batch = 1;
    Sampler sampler = Sampler::greedy;
    bool logprobs = false;
};

// Of the emitted tokens: `chosen` [b,E]; the most likely ones `ids` [b,E,K] with their `values` [b,E,K].
struct Logprobs {
    std::size_t emitted = 0, most = 0;  // E, K
    std::vector<float> chosen;
    std::vector<std::int64_t> ids;
    std::vector<float> values;
};

// Slots 0 .. capabilities.slots()-1 of one bundle on one device.
class Backend {
   public:
    Backend(const Manifest& manifest, Capabilities capabilities, std::unique_ptr<Memory> memory);
    virtual ~Backend() = default;
    Backend(const Backend&) = delete;
    Backend& operator=(const Backend&) = delete;

    const Manifest& manifest() const { return manifest_; }
    const Capabilities& capabilities() const { return capabilities_; }
    // Cache columns that a pass may use now.
    virtual std::int64_t capacity() const { return cache_.capacity(); }

    // Make room for `capacity` columns, keeping the first lengths[slot] of every slot. All or nothing.
    virtual void resize(std::int64_t capacity, std::span<const std::int64_t> lengths);
    // Copy the first `length` entries of slot `source` over those of `target`.
    void move(int source, int target, std::int64_t length) { cache_.move(source, target, length); }
    // How the tokens of `slot` are drawn.
    void set_sampling(int slot, const SamplingParams& params);
    // Leave `slot` out of the passes to come: they write behind `length` and change nothing else of it.
    void park(int slot, std::int64_t length);
    // Lay out the window of `plan` in `slot`, behind `length` cached entries. A draft row without a draft gets id V,
    // which no sample equals.
    void enter(int slot, const Plan& plan, std::int64_t length, std::int64_t root,
               std::span<const std::int64_t> drafts = {});
    // Write the K/V of `tokens` behind `length` entries of `slot`, in a window of `width` rows; the rows beyond the
    // tokens are padding.
    void prefill(int slot, std::int64_t length, std::span<const std::int64_t> tokens, int width);
    // One pass: trunk and tail over the windows in place. The tokens emitted by each slot, none by a parked one; the
    // windows of `kind.plan.next()` are in place afterwards.
    std::vector<std::vector<std::int64_t>> run(const PassKind& kind);
    // Of the tokens that the last pass emitted, which was of this `kind`.
    Logprobs logprobs(const PassKind& kind);

    // The trunk alone over the windows in place, which stay: logits and K/V change.
    virtual void run_trunk(const Plan& plan, int batch) = 0;
    // The tail alone, on the logits in place.
    virtual void run_tail(const PassKind& kind) = 0;

   protected:
    // What a pass over b slots emitted: `count` [b] and `emitted` [b,E].
    struct Emitted {
        std::vector<std::int64_t> count, emitted;
    };

    // Trunk and tail; what they emitted on the host.
    virtual Emitted run_pass(const PassKind& kind);
    // The trunk over the prefill window, on the cache of `slot`; only its K/V matter.
    virtual void run_prefill(int slot, const Plan& plan) = 0;

    const Manifest& manifest_;
    Capabilities capabilities_;
    std::unique_ptr<Memory> memory_;
    Buffers buffers_;
    BundleBindings bindings_;
    KVCache cache_;

   private:
    void set_slot(int slot, std::int64_t length, bool active);
};

}  // namespace pass
