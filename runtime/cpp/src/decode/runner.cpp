#include "decode/runner.h"

#include <algorithm>
#include <exception>

#include "decode/prompt_chunk.h"
#include "errors.h"

namespace pass {

std::int64_t Runner::prefill(Slot& slot, std::optional<std::int64_t> most) {
    Sequence& sequence = *slot.sequence;
    const double started = now();
    const std::vector<std::int64_t>& prompt = sequence.request.prompt_ids;
    const auto [count, width] =
        next_chunk(backend_.capabilities(), sequence.cached,
                   static_cast<std::int64_t>(prompt.size()) - 1 - sequence.cached, backend_.capacity(), most);
    slots_.reserve(sequence.cached + backend_.capabilities().padded_width(width));
    const double begun = now();
    backend_.prefill(
        slot.number, sequence.cached,
        std::span(prompt).subspan(static_cast<std::size_t>(sequence.cached), static_cast<std::size_t>(count)), width);
    const double done = now();
    engine_seconds_ += done - begun;
    if (slot.same == sequence.cached) slot.same += count;
    sequence.cached += count;
    slot.masked = false;  // its length on the device is the old one
    sequence.stats.prefill_seconds += done - started;
    return count;
}

std::pair<std::vector<StepResult>, double> Runner::run(const Plan& plan, const std::map<int, Drafts>& drafts) {
    const std::vector<Slot*> active = slots_.decoding();
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
        results.push_back(step_result_of(slot->sequence, static_cast<std::size_t>(slot->number), slot->left,
                                         slot->source, its, logprobs ? &*logprobs : nullptr));
        left.push_back(plan.left(results.back().last));
    }
    for (std::size_t i = 0; i < active.size(); ++i) count(*active[i], results[i], left[i]);
    window_.swap(next);
    return {std::move(results), seconds};
}

// Write windows of `kind` in all of its slots, and mask them.
void Runner::stage_masked(const PassKind& kind) {
    slots_.make_room(kind.plan, kind.batch);
    window_.reset();
    for (int i = 0; i < kind.batch; ++i) {
        Slot& slot = slots_.all()[static_cast<std::size_t>(i)];
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
        backend_.prefill(slot, slots_.all()[static_cast<std::size_t>(slot)].cached(), token, width);
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
        Slot& slot = slots_.all()[static_cast<std::size_t>(i)];
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
    const auto tokens = static_cast<std::int64_t>(result.tokens.size());
    // The K/V after a tree's second choice are other bits than those of a prompt that is read.
    if (slot.same == sequence.cached) slot.same += result.chain < tokens - 1 ? 1 + result.chain : tokens;
    sequence.cached += tokens;
    sequence.stats.engine_seconds = engine_seconds_ - sequence.engine_before;
    slot.left = left;
    slot.source = TokenSource::lookahead;
}

}  // namespace pass
