#include "decode/slots.h"

#include <algorithm>
#include <new>

namespace pass {

namespace {

// The prompt without its last token, which is the root of the first pass.
std::span<const std::int64_t> all_but_last(const ResolvedRequest& request) {
    return std::span(request.prompt_ids).first(request.prompt_ids.size() - 1);
}

}  // namespace

std::span<const std::int64_t> Slot::held() const {
    if (sequence == nullptr) return kept;
    const std::span tokens(sequence->tokens);  // the pass that ended a text cached more
    return tokens.first(std::min(static_cast<std::size_t>(sequence->cached), tokens.size()));
}

Slots::Slots(Backend& backend, bool prefix_cache) : backend_(backend) {
    slots_.resize(static_cast<std::size_t>(backend.capabilities().slots()));
    for (std::size_t i = 0; i < slots_.size(); ++i) slots_[i].number = static_cast<int>(i);
    if (prefix_cache && backend.capabilities().same_entries)
        store_.emplace(backend.cache(), backend.memory());
}

std::vector<Slot*> Slots::busy() {
    std::vector<Slot*> result;
    for (Slot& slot : slots_) {
        if (slot.sequence != nullptr) result.push_back(&slot);
    }
    return result;
}

std::vector<Slot*> Slots::decoding() {
    std::vector<Slot*> result = busy();
    std::erase_if(result, [](const Slot* slot) { return !slot->sequence->prefilled(); });
    return result;
}

std::int64_t Slots::room() {
    std::int64_t longest = 0;
    for (const Slot* slot : busy()) longest = std::max(longest, slot->cached());
    return backend_.capabilities().max_capacity() - longest;
}

bool Slots::fits(std::size_t prompt_tokens) const {
    const Capabilities& capabilities = backend_.capabilities();
    return static_cast<std::int64_t>(prompt_tokens) - 1 + capabilities.padded_width(1) <=
           capabilities.max_capacity();
}

bool Slots::admit(const std::shared_ptr<SequenceState>& sequence) {
    Slot* chosen = nullptr;
    std::int64_t reused = 0;
    for (Slot& slot : slots_) {
        if (slot.sequence != nullptr) continue;
        const std::int64_t count = reusable(slot, sequence->request);
        // Of slots with equally many reusable tokens, the one that keeps the fewest is taken.
        const bool better = chosen == nullptr || count > reused ||
                            (count == reused && slot.kept.size() < chosen->kept.size());
        if (!better) continue;
        chosen = &slot;
        reused = count;
    }
    if (chosen == nullptr) return false;
    shrink(static_cast<std::int64_t>(sequence->request.prompt_ids.size()) + 1, *chosen, reused);
    backend_.set_sampling(chosen->number, sequence->request.sampling);
    chosen->sequence = sequence;
    chosen->kept.clear();
    chosen->salt = sequence->request.cache_salt;
    chosen->num_drafts = 0;
    chosen->staged = chosen->masked = false;
    sequence->admission_number = ++admitted_;
    sequence->cached = sequence->stats.cached_tokens = reused;
    sequence->leave_queue();
    return true;
}

void Slots::release(Slot& slot) noexcept {
    if (slot.sequence == nullptr) return;
    const std::span<const std::int64_t> held = slot.held();
    try {
        slot.kept.assign(held.begin(), held.end());
    } catch (const std::bad_alloc&) {
        slot.kept.clear();
    }
    slot.staged = slot.masked = false;
    slot.sequence = nullptr;
}

void Slots::share(Slot& slot) {
    SequenceState& sequence = *slot.sequence;
    const double started = now();
    const Slot* source = nullptr;
    std::int64_t count = sequence.cached;
    for (const Slot& other : slots_) {
        const std::int64_t other_count = &other == &slot ? 0 : reusable(other, sequence.request);
        if (other_count <= count) continue;
        source = &other;
        count = other_count;
    }
    PrefixStore::Match stored;
    if (store_) stored = store_->match(all_but_last(sequence.request), sequence.request.cache_salt);
    stored.count = rounded_to_blocks(stored.count);
    if (stored.count > count) {
        count = stored.count;
        reserve(count);
        store_->load(stored, slot.number);
    } else if (source != nullptr) {
        backend_.cache().copy_slot(source->number, slot.number, count);
    } else {
        return;
    }
    sequence.stats.cached_tokens += count - sequence.cached;
    sequence.cached = count;
    slot.masked = false;  // to be masked again with its new length
    sequence.stats.prefill_seconds += now() - started;
}

std::vector<Slot*> Slots::compact() {
    const Capabilities& capabilities = backend_.capabilities();
    while (true) {
        std::vector<Slot*> active = decoding();
        if (active.empty()) return active;
        Slot& source = *active.back();
        const auto target = std::find_if(slots_.begin(), slots_.begin() + source.number,
                                         [](const Slot& slot) { return slot.sequence == nullptr; });
        const bool no_lower_slot = target == slots_.begin() + source.number;
        const bool smallest_batch = capabilities.batch_size(static_cast<int>(active.size())) ==
                                    capabilities.batch_size(source.number + 1);
        if (no_lower_slot || smallest_batch) return active;
        move(source, *target);
    }
}

void Slots::reserve(std::int64_t tokens) {
    if (tokens > backend_.capacity()) resize(backend_.capabilities().capacity(tokens));
}

void Slots::make_room(const Window& window, int batch) {
    const std::span<Slot> slots = std::span(slots_).first(static_cast<std::size_t>(batch));
    std::int64_t longest = 0;
    for (const Slot& slot : slots) {
        if (slot.sequence != nullptr) longest = std::max(longest, slot.cached());
    }
    const std::int64_t width = backend_.capabilities().padded_width(window.width());
    reserve(longest + width);
    for (Slot& slot : slots) {
        const std::int64_t fitting = backend_.capacity() - width;
        if (slot.cached() > fitting) truncate_kept(slot, fitting);
    }
}

void Slots::resize(std::int64_t capacity) {
    std::vector<std::int64_t> lengths;
    for (const Slot& slot : slots_) lengths.push_back(slot.cached());
    backend_.resize(capacity, lengths);
}

// Shrink a cache that is longer than all sequences need, because a pass takes time for its whole
// length. tokens: the length of a new sequence in `slot`, where it reuses `reused`.
void Slots::shrink(std::int64_t tokens, Slot& slot, std::int64_t reused) {
    truncate_kept(slot, reused);
    for (const Slot* other : busy())
        tokens = std::max(tokens, static_cast<std::int64_t>(other->sequence->tokens.size()) + 1);
    const Capabilities& capabilities = backend_.capabilities();
    const std::int64_t fitting =
        capabilities.capacity(std::min(tokens, capabilities.max_capacity()));
    if (fitting < backend_.capacity()) {
        for (Slot& other : slots_) truncate_kept(other, fitting);
        resize(fitting);
    }
}

// Of a free slot. If tokens are dropped, they are saved first. Then the slot must be masked again:
// until then the device has its old length.
void Slots::truncate_kept(Slot& slot, std::int64_t tokens) {
    if (tokens < static_cast<std::int64_t>(slot.kept.size())) {
        if (store_) store_->save(slot.number, slot.kept, slot.salt);
        slot.kept.resize(static_cast<std::size_t>(tokens));
    }
    slot.staged = slot.masked = false;
}

void Slots::move(Slot& source, Slot& target) {
    truncate_kept(target, 0);
    backend_.cache().copy_slot(source.number, target.number, source.sequence->cached);
    backend_.set_sampling(target.number, source.sequence->request.sampling);
    target.sequence = std::move(source.sequence);
    target.salt = source.salt;
    target.num_drafts = 0;  // its drafts were in the window that it left
    source.sequence = nullptr;
    truncate_kept(source, 0);
}

// How many prompt tokens of `request`, in whole blocks, have K/V in `slot` that it may use. Without
// a prefix store, only requests with `reuse_prefix` may use any.
std::int64_t Slots::reusable(const Slot& slot, const ResolvedRequest& request) const {
    if (slot.salt != request.cache_salt || (!store_ && !request.reuse_prefix)) return 0;
    return rounded_to_blocks(common_prefix(slot.held(), all_but_last(request)));
}

}  // namespace pass
