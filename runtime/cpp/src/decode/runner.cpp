#include "decode/runner.h"

#include <algorithm>
#include <exception>

#include "errors.h"
#include "log.h"

namespace pass {

namespace {

constexpr int runs_until_captured = 2;  // a pass is captured after its second run

// Log-probabilities of emitted token `index` of `slot`, and of the `top` likeliest tokens there.
TokenLogprobs logprobs_of(const Logprobs& logprobs, int slot, std::size_t index, int top) {
    const std::size_t row = static_cast<std::size_t>(slot) * logprobs.max_emitted + index;
    TokenLogprobs result{logprobs.chosen[row], {}};
    for (std::size_t i = 0; i < std::min(static_cast<std::size_t>(top), logprobs.top); ++i) {
        const std::size_t entry = row * logprobs.top + i;
        result.top.emplace_back(logprobs.ids[entry], logprobs.values[entry]);
    }
    return result;
}

// The result of a pass for the sequence of `slot`. logprobs: of the whole pass; may be null.
SlotResult result_of(const Slot& slot, const Emitted& emitted, const Logprobs* logprobs) {
    const std::vector<std::int64_t>& ids = emitted.tokens;
    SlotResult result{
        slot.sequence, slot.num_drafts, slot.source, 0, static_cast<int>(emitted.rows.back()), {}};
    // Row 0 is the root, and row i the first choice at depth i.
    int& accepted = result.accepted_first_choices;
    while (static_cast<std::size_t>(accepted) + 1 < emitted.rows.size() &&
           emitted.rows[static_cast<std::size_t>(accepted) + 1] == accepted + 1)
        ++accepted;
    for (std::size_t i = 0; i < ids.size(); ++i) {  // the last one is the bonus token
        Token token{ids[i], i + 1 < ids.size() ? slot.source : TokenSource::model, std::nullopt,
                    ""};
        const std::optional<int>& count = slot.sequence->request.logprobs;
        if (logprobs != nullptr && count)
            token.logprobs = logprobs_of(*logprobs, slot.number, i, *count);
        result.tokens.push_back(std::move(token));
    }
    return result;
}

}  // namespace

PromptChunk next_chunk(const Capabilities& capabilities, std::int64_t cached,
                       std::int64_t remaining, std::int64_t capacity,
                       std::optional<std::int64_t> max_rows) {
    const std::vector<int> offered = capabilities.chunks(cached, capacity);
    std::vector<int> widths;
    for (int width : offered) {
        if (!max_rows.has_value() || width <= *max_rows) widths.push_back(width);
    }
    if (widths.empty()) widths.push_back(offered.back());
    int narrowest_holding = 0;  // the narrowest window that holds all remaining tokens
    int widest_filled = 0;      // the widest window that they fill
    for (int width : widths) {  // in falling order
        if (width >= remaining) narrowest_holding = width;
        if (width <= remaining && widest_filled == 0) widest_filled = width;
    }
    const bool nearly_full = 4 * remaining >= std::int64_t{3} * narrowest_holding;
    if (narrowest_holding > 0 && (nearly_full || widest_filled == 1))
        return {remaining, narrowest_holding};
    return {widest_filled, widest_filled};
}

std::int64_t Runner::prefill(Slot& slot, std::optional<std::int64_t> max_rows) {
    SequenceState& sequence = *slot.sequence;
    const double started = now();
    const std::vector<std::int64_t>& prompt = sequence.request.prompt_ids;
    const auto [count, width] =
        next_chunk(backend_.capabilities(), sequence.cached,
                   static_cast<std::int64_t>(prompt.size()) - 1 - sequence.cached,
                   backend_.capacity(), max_rows);
    slots_.reserve(sequence.cached + backend_.capabilities().padded_width(width));
    const double engine_started = now();
    backend_.prefill(slot.number, sequence.cached,
                     std::span(prompt).subspan(static_cast<std::size_t>(sequence.cached),
                                               static_cast<std::size_t>(count)),
                     width);
    const double done = now();
    engine_seconds_ += done - engine_started;
    if (slot.exact_prefix_len == sequence.cached) slot.exact_prefix_len += count;
    sequence.cached += count;
    slot.masked = false;  // to be masked again with its new length
    sequence.stats.prefill_seconds += done - started;
    return count;
}

std::pair<std::vector<SlotResult>, double> Runner::run(const Plan& plan,
                                                       const std::map<int, Drafts>& drafts) {
    const std::vector<Slot*> active = slots_.decoding();
    PassKind kind{plan, batch(active), sampler(active), false};
    for (const Slot* slot : active) {
        SequenceState& sequence = *slot->sequence;
        kind.logprobs = kind.logprobs || sequence.request.logprobs;
        if (!sequence.processors) continue;
        kind.touched_count = std::max(kind.touched_count,
                                      sequence.processors->list_size(sequence.tokens, plan.drafts));
    }
    // Under the rejection rule, windows from another sampler's tail may lack the draft
    // probabilities that this sampler's tail needs.
    if (kind.sampler != sampler_ && backend_.manifest().rule == "rejection") staged_plan_.reset();
    sampler_ = kind.sampler;
    stage(kind, drafts);
    if (kind.touched_count > 0) set_processors(kind, active);
    staged_plan_.reset();  // until the pass is done
    const double started = now();
    for (Slot* slot : active) {
        if (slot->sequence->decoding_since) continue;
        slot->sequence->decoding_since = started;
        slot->sequence->engine_seconds_before = engine_seconds_;
    }
    const std::vector<Emitted> emitted = backend_.run(kind);
    const double seconds = now() - started;
    engine_seconds_ += seconds;
    std::optional<Logprobs> logprobs;
    if (kind.logprobs) logprobs = backend_.logprobs(kind);
    // All results are computed before any is recorded, so that a failure changes no record.
    std::optional<Plan> next = plan.next();
    std::vector<SlotResult> results;
    std::vector<int> next_drafts;
    for (const Slot* slot : active) {
        const Emitted& tokens = emitted[static_cast<std::size_t>(slot->number)];
        results.push_back(result_of(*slot, tokens, logprobs ? &*logprobs : nullptr));
        next_drafts.push_back(plan.next_draft_depth(results.back().last_row));
    }
    for (std::size_t i = 0; i < active.size(); ++i) record(*active[i], results[i], next_drafts[i]);
    staged_plan_.swap(next);
    return {std::move(results), seconds};
}

// Write some window of the plan in every slot of a pass of `kind`, and mask these slots.
void Runner::stage_masked(const PassKind& kind) {
    slots_.make_room(kind.plan, kind.batch);
    staged_plan_.reset();
    for (int i = 0; i < kind.batch; ++i) {
        Slot& slot = slots_.all()[static_cast<std::size_t>(i)];
        backend_.stage(slot.number, kind.plan, slot.cached(), 0);
        mask(slot);
    }
}

PassSeconds Runner::time_masked_pass(const PassKind& kind) {
    stage_masked(kind);
    const double started = now();
    backend_.run_trunk(kind.plan, kind.batch);
    const double trunk_done = now();
    backend_.run_tail(kind);
    const double done = now();
    engine_seconds_ += done - started;
    return {trunk_done - started, done - trunk_done};
}

int Runner::batch(const std::vector<Slot*>& active) const {
    return backend_.capabilities().batch_size(active.back()->number + 1);
}

Sampler Runner::sampler(const std::vector<Slot*>& active) {
    Sampler result = Sampler::greedy;
    for (const Slot* slot : active)
        result = std::max(result, slot->sequence->request.sampling.sampler());
    return result;
}

// Write the windows that differ from those on the device, and mask the slots that take no part.
void Runner::stage(const PassKind& kind, const std::map<int, Drafts>& drafts) {
    for (int i = 0; i < kind.batch; ++i) {
        Slot& slot = slots_.all()[static_cast<std::size_t>(i)];
        if (slot.sequence == nullptr || !slot.sequence->prefilled()) {
            if (!slot.masked) mask(slot);
            continue;
        }
        const auto given = drafts.find(slot.number);
        if (staged_plan_ == kind.plan && slot.staged && given == drafts.end()) continue;
        const Drafts& ngrams = given != drafts.end() ? given->second : Drafts{};
        slot.staged = false;
        backend_.stage(slot.number, kind.plan, slot.sequence->cached, slot.sequence->tokens.back(),
                       ngrams);
        slot.num_drafts = static_cast<int>(ngrams.size());
        slot.source = TokenSource::ngram;
        slot.staged = true;
        slot.masked = false;
    }
}

void Runner::set_processors(const PassKind& kind, const std::vector<Slot*>& active) {
    const std::vector<std::vector<std::int64_t>> drafts = backend_.drafts(kind.plan, kind.batch);
    const ProcessedRows nothing =
        no_processing(backend_.capabilities().vocab_size, kind.plan.drafts + 1, kind.touched_count);
    for (int slot = 0; slot < kind.batch; ++slot) backend_.set_processors(slot, nothing);
    for (const Slot* slot : active) {
        SequenceState& sequence = *slot->sequence;
        if (!sequence.processors || sequence.processors_error != nullptr) continue;
        try {
            const auto& staged = drafts[static_cast<std::size_t>(slot->number)];
            backend_.set_processors(slot->number, sequence.processors->rows(sequence.tokens, staged,
                                                                            kind.touched_count));
        } catch (const DeviceLost&) {
            throw;
        } catch (...) {  // thrown by `allowed_tokens` of the request
            sequence.processors_error = std::current_exception();
        }
    }
}

void Runner::mask(Slot& slot) {
    slot.staged = slot.masked = false;
    backend_.mask(slot.number, slot.cached());
    slot.masked = true;
}

// Record a pass for one slot. next_drafts: how many drafts the next window holds.
void Runner::record(Slot& slot, const SlotResult& result, int next_drafts) noexcept {
    SequenceState& sequence = *result.sequence;
    const auto tokens = static_cast<std::int64_t>(result.tokens.size());
    // After a tree's second or later choice, K/V may differ in bits from a prefill's.
    if (slot.exact_prefix_len == sequence.cached)
        slot.exact_prefix_len += 1 + result.accepted_first_choices;
    sequence.cached += tokens;
    sequence.stats.engine_seconds = engine_seconds_ - sequence.engine_seconds_before;
    slot.num_drafts = next_drafts;
    slot.source = TokenSource::lookahead;
}

void Runner::run_all_passes(std::int64_t max_kept, std::int64_t capacity, int batch,
                            const std::vector<Sampler>& samplers) {
    const Capabilities& capabilities = backend_.capabilities();
    const auto fits = [&](int width) {
        return max_kept + capabilities.padded_width(width) <= capacity;
    };
    for (const Plan& plan :
         capabilities.mode_plans(static_cast<int>(backend_.manifest().lookahead.length))) {
        if (!fits(plan.width())) continue;
        for (Sampler sampler : samplers) {
            const PassKind kind{plan, batch, sampler, false};
            stage_masked(kind);
            for (int run = 0; run < runs_until_captured; ++run) backend_.run(kind);
        }
    }
    const std::vector<std::int64_t> token{0};
    int smaller_batch = 0;  // the next smaller batch size
    for (int size : capabilities.batch_sizes) smaller_batch = size < batch ? size : smaller_batch;
    for (int slot = smaller_batch; slot < batch; ++slot) {
        for (int width : capabilities.chunks(max_kept, capacity)) {
            for (int run = 0; fits(width) && run < runs_until_captured; ++run) {
                backend_.prefill(slot, slots_.all()[static_cast<std::size_t>(slot)].cached(), token,
                                 width);
            }
        }
    }
}

void Runner::capture_graphs(std::int64_t capacity, int batch,
                            const std::vector<Sampler>& samplers) {
    const std::int64_t capacity_before = backend_.capacity();
    std::int64_t max_kept = 0;
    for (const Slot& slot : slots_.all()) max_kept = std::max(max_kept, slot.cached());
    if (!slots_.busy().empty() || max_kept >= capacity) return;
    try {
        slots_.resize(capacity);
        run_all_passes(max_kept, capacity, batch, samplers);
    } catch (const DeviceLost&) {
        throw;
    } catch (const std::exception& error) {  // a request that needs such a pass gets the same error
        log(LogLevel::warning,
            "not all passes over " + std::to_string(batch) +
                " slots could be captured before requests need them: " + error.what());
    }
    if (capacity_before > 0) slots_.resize(capacity_before);  // 0: the first request sets it
}

}  // namespace pass
