#include "decode/runner.h"

#include <algorithm>
#include <exception>
#include <vector>

#include "errors.h"
#include "log.h"

namespace pass {

namespace {

constexpr int runs_until_captured = 2;

}  // namespace

PromptChunk next_chunk(const Capabilities& sizes, std::int64_t cached, std::int64_t remaining, std::int64_t capacity,
                       std::optional<std::int64_t> most) {
    const std::vector<int> offered = sizes.chunks(cached, capacity);
    std::vector<int> widths;
    for (int width : offered) {
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

namespace {

TokenLogprobs logprobs_of(const Logprobs& logprobs, std::size_t slot, std::size_t place, int count) {
    const std::size_t row = slot * logprobs.emitted + place;
    TokenLogprobs found{logprobs.chosen[row], {}};
    for (std::size_t i = 0; i < std::min(static_cast<std::size_t>(count), logprobs.most); ++i) {
        const std::size_t at = row * logprobs.most + i;
        found.top.emplace_back(logprobs.ids[at], logprobs.values[at]);
    }
    return found;
}

}  // namespace

StepResult step_result_of(const std::shared_ptr<SequenceState>& sequence, std::size_t slot, int drafted,
                          TokenSource source, const Emitted& emitted, const Logprobs* logprobs) {
    const std::vector<std::int64_t>& ids = emitted.tokens;
    StepResult result{sequence, drafted, source, 0, static_cast<int>(emitted.rows.back()), {}};
    while (result.chain + 1 < static_cast<int>(emitted.rows.size()) &&
           emitted.rows[static_cast<std::size_t>(result.chain) + 1] == result.chain + 1) {
        ++result.chain;
    }
    for (std::size_t i = 0; i < ids.size(); ++i) {
        Token token{ids[i], i + 1 < ids.size() ? source : TokenSource::model, std::nullopt, ""};
        const std::optional<int>& count = sequence->request.logprobs;
        if (logprobs != nullptr && count) token.logprobs = logprobs_of(*logprobs, slot, i, *count);
        result.tokens.push_back(std::move(token));
    }
    return result;
}

std::int64_t Runner::prefill(Slot& slot, std::optional<std::int64_t> most) {
    SequenceState& sequence = *slot.sequence;
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
    if (slot.exact_prefix_len == sequence.cached) slot.exact_prefix_len += count;
    sequence.cached += count;
    slot.masked = false;  // its length on the device is the old one
    sequence.stats.prefill_seconds += done - started;
    return count;
}

std::pair<std::vector<StepResult>, double> Runner::run(const Plan& plan, const std::map<int, Drafts>& drafts) {
    const std::vector<Slot*> active = slots_.decoding();
    PassKind kind{plan, batch(active), sampler(active), false};
    for (const Slot* slot : active) {
        SequenceState& sequence = *slot->sequence;
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
    std::vector<int> next_drafts;
    for (const Slot* slot : active) {
        const Emitted& its = emitted[static_cast<std::size_t>(slot->number)];
        results.push_back(step_result_of(slot->sequence, static_cast<std::size_t>(slot->number), slot->num_drafts,
                                         slot->source, its, logprobs ? &*logprobs : nullptr));
        next_drafts.push_back(plan.next_drafts(results.back().last));
    }
    for (std::size_t i = 0; i < active.size(); ++i) count(*active[i], results[i], next_drafts[i]);
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
        slot.num_drafts = static_cast<int>(ngrams.size());
        slot.source = TokenSource::ngram;
        slot.staged = true;
        slot.masked = false;
    }
}

void Runner::process(const PassKind& kind, const std::vector<Slot*>& active) {
    const std::vector<std::vector<std::int64_t>> drafts = backend_.drafts(kind.plan, kind.batch);
    const ProcessedRows nothing = no_processing(backend_.capabilities().vocab_size, kind.plan.drafts + 1, kind.touched);
    for (int slot = 0; slot < kind.batch; ++slot) backend_.set_processors(slot, nothing);
    for (const Slot* slot : active) {
        SequenceState& sequence = *slot->sequence;
        if (!sequence.processors || sequence.problem != nullptr) continue;
        try {
            const auto& its = drafts[static_cast<std::size_t>(slot->number)];
            backend_.set_processors(slot->number, sequence.processors->rows(sequence.tokens, its, kind.touched));
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
void Runner::count(Slot& slot, const StepResult& result, int next_drafts) noexcept {
    SequenceState& sequence = *result.sequence;
    const auto tokens = static_cast<std::int64_t>(result.tokens.size());
    // The K/V after a tree's second choice are other bits than those of a prompt that is read.
    if (slot.exact_prefix_len == sequence.cached)
        slot.exact_prefix_len += result.chain < tokens - 1 ? 1 + result.chain : tokens;
    sequence.cached += tokens;
    sequence.stats.engine_seconds = engine_seconds_ - sequence.engine_before;
    slot.num_drafts = next_drafts;
    slot.source = TokenSource::lookahead;
}

void Runner::run_everything(std::int64_t kept, std::int64_t capacity, int batch, const std::vector<Sampler>& samplers) {
    const Capabilities& limits = backend_.capabilities();
    const auto fits = [&](int width) { return kept + limits.padded_width(width) <= capacity; };
    for (const Plan& plan : limits.mode_plans(static_cast<int>(backend_.manifest().lookahead.length))) {
        if (!fits(plan.width())) continue;
        for (Sampler sampler : samplers) {
            const PassKind kind{plan, batch, sampler, false};
            stage_masked(kind);
            for (int run = 0; run < runs_until_captured; ++run) backend_.run(kind);
        }
    }
    const std::vector<std::int64_t> token{0};
    int first = 0;
    for (int size : limits.batch_sizes) first = size < batch ? size : first;
    for (int slot = first; slot < batch; ++slot) {
        for (int width : limits.chunks(kept, capacity)) {
            for (int run = 0; fits(width) && run < runs_until_captured; ++run) {
                backend_.prefill(slot, slots_.all()[static_cast<std::size_t>(slot)].cached(), token, width);
            }
        }
    }
}

void Runner::capture_graphs(std::int64_t capacity, int batch, const std::vector<Sampler>& samplers) {
    const std::int64_t before = backend_.capacity();
    std::int64_t kept = 0;
    for (const Slot& slot : slots_.all()) kept = std::max(kept, slot.cached());
    if (!slots_.busy().empty() || kept >= capacity) return;
    try {
        slots_.resize(capacity);
        run_everything(kept, capacity, batch, samplers);
    } catch (const DeviceLost&) {
        throw;
    } catch (const Error& error) {  // a request that needs such a pass meets the same error, and reports it
        log(LogLevel::warning, "passes over " + std::to_string(batch) +
                                   " slots were not all run before requests need them: " + error.what());
    }
    if (before > 0) slots_.resize(before);
}

}  // namespace pass
