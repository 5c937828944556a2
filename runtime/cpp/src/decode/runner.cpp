#include "decode/runner.h"

#include <algorithm>
#include <exception>

#include "errors.h"

namespace pass {

namespace {

std::size_t common_prefix(const std::vector<std::int64_t>& a, const std::vector<std::int64_t>& b, std::size_t most) {
    const std::size_t end = std::min({a.size(), b.size(), most});
    std::size_t i = 0;
    while (i < end && a[i] == b[i]) ++i;
    return i;
}

// Keep the first `tokens` kept tokens of `slot`. Its length and mask must then be written to the device again, or a
// pass would write after the old length.
void keep(Slot& slot, std::size_t tokens) {
    slot.kept.resize(std::min(tokens, slot.kept.size()));
    slot.staged = slot.masked = false;
}

TokenLogprobs logprobs_of(const Logprobs& logprobs, std::size_t slot, std::size_t place, int count) {
    const std::size_t row = slot * logprobs.emitted + place;
    TokenLogprobs found{logprobs.chosen[row], {}};
    for (std::size_t i = 0; i < std::min(static_cast<std::size_t>(count), logprobs.most); ++i) {
        const std::size_t at = row * logprobs.most + i;
        found.top.emplace_back(logprobs.ids[at], logprobs.values[at]);
    }
    return found;
}

// What a pass did for the sequence of `slot`. Changes nothing.
StepResult step_result_of(const Slot& slot, const Emitted& emitted, const Logprobs* logprobs) {
    const Sequence& sequence = *slot.sequence;
    const std::vector<std::int64_t>& ids = emitted.tokens;
    StepResult result{slot.sequence, slot.left, slot.source, 0, static_cast<int>(emitted.rows.back()), {}};
    while (result.chain + 1 < static_cast<int>(emitted.rows.size()) &&
           emitted.rows[static_cast<std::size_t>(result.chain) + 1] == result.chain + 1) {
        ++result.chain;
    }
    for (std::size_t i = 0; i < ids.size(); ++i) {
        Token token{ids[i], i + 1 < ids.size() ? slot.source : TokenSource::model, std::nullopt, ""};
        if (logprobs != nullptr && sequence.request.logprobs) {
            token.logprobs =
                logprobs_of(*logprobs, static_cast<std::size_t>(slot.number), i, *sequence.request.logprobs);
        }
        result.tokens.push_back(std::move(token));
    }
    return result;
}

}  // namespace

Runner::Runner(Backend& backend) : backend_(backend) {
    slots_.resize(static_cast<std::size_t>(backend.capabilities().slots()));
    for (std::size_t i = 0; i < slots_.size(); ++i) slots_[i].number = static_cast<int>(i);
}

std::vector<Slot*> Runner::busy() {
    std::vector<Slot*> found;
    for (Slot& slot : slots_) {
        if (slot.sequence != nullptr) found.push_back(&slot);
    }
    return found;
}

std::vector<Slot*> Runner::decoding() {
    std::vector<Slot*> found;
    for (Slot& slot : slots_) {
        if (slot.sequence != nullptr && slot.sequence->prefilled()) found.push_back(&slot);
    }
    return found;
}

std::int64_t Runner::room() {
    std::int64_t longest = 0;
    for (const Slot* slot : busy()) longest = std::max(longest, slot->cached());
    return backend_.capabilities().max_capacity() - longest;
}

bool Runner::fits(std::size_t prompt) const {
    const Capabilities& sizes = backend_.capabilities();
    return static_cast<std::int64_t>(prompt) - 1 + sizes.padded_width(1) <= sizes.max_capacity();
}

bool Runner::admit(const std::shared_ptr<Sequence>& sequence) {
    const std::vector<std::int64_t>& prompt = sequence->request.prompt_ids;
    const bool reuse = sequence->request.reuse_prefix;
    Slot* chosen = nullptr;
    std::size_t shared = 0;
    for (Slot& slot : slots_) {
        if (slot.sequence != nullptr) continue;
        const std::size_t common = reuse ? common_prefix(slot.kept, prompt, prompt.size() - 1) : 0;
        if (chosen == nullptr || (reuse ? common > shared : slot.kept.size() < chosen->kept.size())) {
            chosen = &slot;
            shared = common;
        }
    }
    if (chosen == nullptr) return false;
    fit(static_cast<std::int64_t>(prompt.size()) + 1, *chosen, shared);
    backend_.set_sampling(chosen->number, sequence->request.sampling);
    chosen->sequence = sequence;
    chosen->kept.clear();
    chosen->left = 0;
    chosen->staged = chosen->masked = false;
    chosen->admitted = ++admitted_;
    sequence->cached = static_cast<std::int64_t>(shared);
    sequence->stats.cached_tokens = sequence->cached;
    sequence->leave_queue();
    return true;
}

void Runner::release(Slot& slot) {
    if (slot.sequence == nullptr) return;
    slot.kept = slot.sequence->tokens;
    keep(slot, static_cast<std::size_t>(slot.sequence->cached));
    slot.sequence = nullptr;
}

std::int64_t Runner::prefill(Slot& slot, std::optional<std::int64_t> most) {
    Sequence& sequence = *slot.sequence;
    const double started = now();
    const std::vector<std::int64_t>& prompt = sequence.request.prompt_ids;
    const auto [count, width] = chunk(sequence.cached, static_cast<std::int64_t>(prompt.size()) - 1, most);
    reserve(sequence.cached + backend_.capabilities().padded_width(width));
    const double begun = now();
    backend_.prefill(
        slot.number, sequence.cached,
        std::span(prompt).subspan(static_cast<std::size_t>(sequence.cached), static_cast<std::size_t>(count)), width);
    const double done = now();
    engine_seconds_ += done - begun;
    sequence.cached += count;
    slot.masked = false;  // its length on the device is the old one
    sequence.stats.prefill_seconds += done - started;
    return count;
}

void Runner::make_room(const Plan& plan, int batch) {
    std::int64_t longest = 0;
    for (int i = 0; i < batch; ++i) {
        const Slot& slot = slots_[static_cast<std::size_t>(i)];
        if (slot.sequence != nullptr) longest = std::max(longest, slot.cached());
    }
    const std::int64_t window = backend_.capabilities().padded_width(plan.width());
    reserve(longest + window);
    for (int i = 0; i < batch; ++i) {
        Slot& slot = slots_[static_cast<std::size_t>(i)];
        const std::int64_t most = backend_.capacity() - window;
        if (slot.sequence == nullptr && slot.cached() > most) keep(slot, static_cast<std::size_t>(most));
    }
}

std::pair<std::vector<StepResult>, double> Runner::run(const Plan& plan, const std::map<int, Drafts>& drafts) {
    const std::vector<Slot*> active = decoding();
    PassKind kind{plan, batch(active), sampler(active), false};
    for (const Slot* slot : active) {
        Sequence& sequence = *slot->sequence;
        kind.logprobs = kind.logprobs || sequence.request.logprobs;
        if (!sequence.processors) continue;
        kind.touched = std::max(kind.touched, sequence.processors->size(sequence.tokens, plan.drafts));
    }
    // Under the rejection rule a tail compares probabilities of the drafts, which another sampler's tail did not write.
    if (kind.sampler != sampler_ && backend_.manifest().rule == "rejection") window_.reset();
    sampler_ = kind.sampler;
    lay_out(kind, drafts);
    if (kind.touched > 0) process(kind, active);
    window_.reset();  // until the pass is done
    const double started = now();
    for (Slot* slot : active) {
        if (slot->sequence->decoding_since) continue;
        slot->sequence->decoding_since = started;
        slot->sequence->engine_before = engine_seconds_;
    }
    const std::vector<Emitted> emitted = backend_.run(kind);
    const double seconds = now() - started;
    engine_seconds_ += seconds;
    std::optional<Logprobs> logprobs;
    if (kind.logprobs) logprobs = backend_.logprobs(kind);
    // Everything that may throw is done before anything is recorded, so that a failure leaves the records as they were.
    std::optional<Plan> next = plan.next();
    std::vector<StepResult> results;
    std::vector<int> left;
    for (const Slot* slot : active) {
        const Emitted& its = emitted[static_cast<std::size_t>(slot->number)];
        results.push_back(step_result_of(*slot, its, logprobs ? &*logprobs : nullptr));
        left.push_back(plan.left(results.back().last));
    }
    for (std::size_t i = 0; i < active.size(); ++i) count(*active[i], results[i], left[i]);
    window_.swap(next);
    return {std::move(results), seconds};
}

// Write windows of `kind` in all of its slots, and mask them.
void Runner::stage_masked(const PassKind& kind) {
    make_room(kind.plan, kind.batch);
    window_.reset();
    for (int i = 0; i < kind.batch; ++i) {
        Slot& slot = slots_[static_cast<std::size_t>(i)];
        backend_.stage(slot.number, kind.plan, slot.cached(), 0);
        mask(slot);
    }
}

void Runner::rehearse(const PassKind& kind, int runs) {
    stage_masked(kind);
    for (int i = 0; i < runs; ++i) backend_.run(kind);
}

void Runner::rehearse_prefill(int slot, int width, int runs) {
    const std::vector<std::int64_t> token{0};
    for (int i = 0; i < runs; ++i) {
        backend_.prefill(slot, slots_[static_cast<std::size_t>(slot)].cached(), token, width);
    }
}

PassSeconds Runner::idle_pass(const PassKind& kind) {
    stage_masked(kind);
    const double started = now();
    backend_.run_trunk(kind.plan, kind.batch);
    const double between = now();
    backend_.run_tail(kind);
    const double done = now();
    engine_seconds_ += done - started;
    return {between - started, done - between};
}

std::vector<Slot*> Runner::gather() {
    const Capabilities& sizes = backend_.capabilities();
    while (true) {
        std::vector<Slot*> active = decoding();
        if (active.empty()) return active;
        Slot& source = *active.back();
        const auto target = std::find_if(slots_.begin(), slots_.begin() + source.number,
                                         [](const Slot& slot) { return slot.sequence == nullptr; });
        const bool none = target == slots_.begin() + source.number;
        if (none || sizes.batch_size(static_cast<int>(active.size())) == sizes.batch_size(source.number + 1)) {
            return active;
        }
        move(source, *target);
    }
}

int Runner::batch(const std::vector<Slot*>& active) const {
    return backend_.capabilities().batch_size(active.back()->number + 1);
}

Sampler Runner::sampler(const std::vector<Slot*>& active) {
    Sampler found = Sampler::greedy;
    for (const Slot* slot : active) found = std::max(found, slot->sequence->request.sampling.sampler());
    return found;
}

// Write the windows that are not on the device yet, and mask the slots that have no part in the pass.
void Runner::lay_out(const PassKind& kind, const std::map<int, Drafts>& drafts) {
    for (int i = 0; i < kind.batch; ++i) {
        Slot& slot = slots_[static_cast<std::size_t>(i)];
        if (slot.sequence == nullptr || !slot.sequence->prefilled()) {
            if (!slot.masked) mask(slot);
            continue;
        }
        const auto given = drafts.find(slot.number);
        if (window_ == kind.plan && slot.staged && given == drafts.end()) continue;
        const Drafts& ngrams = given != drafts.end() ? given->second : Drafts{};
        slot.staged = false;
        backend_.stage(slot.number, kind.plan, slot.sequence->cached, slot.sequence->tokens.back(), ngrams);
        slot.left = static_cast<int>(ngrams.size());
        slot.source = TokenSource::ngram;
        slot.staged = true;
        slot.masked = false;
    }
}

void Runner::process(const PassKind& kind, const std::vector<Slot*>& active) {
    const std::vector<std::vector<std::int64_t>> drafts = backend_.drafts(kind.plan, kind.batch);
    const ProcessedRows nothing = no_processing(backend_.capabilities().vocab_size, kind.plan.drafts + 1, kind.touched);
    for (int slot = 0; slot < kind.batch; ++slot) backend_.process(slot, nothing);
    for (const Slot* slot : active) {
        Sequence& sequence = *slot->sequence;
        if (!sequence.processors || sequence.problem != nullptr) continue;
        try {
            const auto& its = drafts[static_cast<std::size_t>(slot->number)];
            backend_.process(slot->number, sequence.processors->rows(sequence.tokens, its, kind.touched));
        } catch (const DeviceLost&) {
            throw;
        } catch (...) {  // from the request's own function
            sequence.problem = std::current_exception();
        }
    }
}

void Runner::mask(Slot& slot) {
    slot.staged = slot.masked = false;
    backend_.mask(slot.number, slot.cached());
    slot.masked = true;
}

// Record a pass for one slot; the tail left `left` drafts in its next window.
void Runner::count(Slot& slot, const StepResult& result, int left) noexcept {
    Sequence& sequence = *result.sequence;
    sequence.cached += static_cast<std::int64_t>(result.tokens.size());
    sequence.stats.engine_seconds = engine_seconds_ - sequence.engine_before;
    slot.left = left;
    slot.source = TokenSource::lookahead;
}

// Grow the KV cache to at least `tokens`.
void Runner::reserve(std::int64_t tokens) {
    if (tokens > backend_.capacity()) resize(backend_.capabilities().capacity(tokens));
}

// Before a sequence of `tokens` joins in `slot`: shrink a KV cache that is longer than all sequences need, since a pass
// takes longer over a longer cache. Kept K/V that no longer fit are dropped.
void Runner::fit(std::int64_t tokens, Slot& slot, std::size_t kept) {
    keep(slot, kept);
    for (const Slot* other : busy()) {
        tokens = std::max(tokens, static_cast<std::int64_t>(other->sequence->tokens.size()) + 1);
    }
    const Capabilities& sizes = backend_.capabilities();
    const std::int64_t fitting = sizes.capacity(std::min(tokens, sizes.max_capacity()));
    if (fitting < backend_.capacity()) {
        for (Slot& other : slots_) keep(other, static_cast<std::size_t>(fitting));
        resize(fitting);
    }
}

void Runner::resize(std::int64_t capacity) {
    std::vector<std::int64_t> lengths;
    for (const Slot& slot : slots_) lengths.push_back(slot.cached());
    backend_.resize(capacity, lengths);
}

void Runner::move(Slot& source, Slot& target) {
    keep(target, 0);
    backend_.move(source.number, target.number, source.sequence->cached);
    backend_.set_sampling(target.number, source.sequence->request.sampling);
    target.sequence = std::move(source.sequence);
    source.sequence = nullptr;
    keep(source, 0);
}

// How many prompt tokens the next chunk has, and the rows of its window. The narrowest window that holds all remaining
// tokens is taken if they fill three quarters of it, or if they fill no other; else the widest that they fill.
std::pair<std::int64_t, int> Runner::chunk(std::int64_t start, std::int64_t stop,
                                           std::optional<std::int64_t> most) const {
    const std::int64_t left = backend_.capabilities().max_capacity() - start, remaining = stop - start;
    std::vector<int> offered, widths;
    for (int width : backend_.capabilities().prefill_widths) {
        if (backend_.capabilities().padded_width(width) > left) continue;
        offered.push_back(width);
        if (!most.has_value() || width <= *most) widths.push_back(width);
    }
    if (widths.empty()) widths.push_back(offered.back());
    int filled = 0, holding = 0;
    for (int width : widths) {
        if (width >= remaining) holding = width;
        if (width <= remaining && filled == 0) filled = width;
    }
    if (holding > 0 && (4 * remaining >= std::int64_t{3} * holding || filled == 1)) return {remaining, holding};
    return {filled, filled};
}

}  // namespace pass
