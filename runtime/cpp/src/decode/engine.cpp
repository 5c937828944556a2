#include "decode/engine.h"

#include <algorithm>
#include <array>
#include <exception>

#include "errors.h"
#include "log.h"

namespace pass {

namespace {

// While sequences decode, a step begins no prompt chunk after this many tokens; none is wider.
constexpr std::int64_t max_prompt_tokens = 64;
constexpr int runs_until_captured = 2;

Drafts first_of(const Drafts& drafts, int count) {
    const auto size = static_cast<std::ptrdiff_t>(drafts.size());
    return {drafts.begin(), drafts.begin() + std::min<std::ptrdiff_t>(count, size)};
}

DraftState draft_state_of(const Slot& slot) {
    SequenceState& sequence = *slot.sequence;
    DraftState result{slot.num_drafts, {}, sequence.rates ? &*sequence.rates : nullptr};
    if (sequence.copies) result.ngram = sequence.copies->propose(sequence.request.ngram_drafts);
    return result;
}

// How many n-gram drafts pay where rows cost time, for plans that a request names.
int worth_drafting(const CopiedDrafts& drafts) {
    constexpr std::array<int, 6> by_confidence{0, 2, 4, 4, 8, 16};
    const auto confidence = static_cast<std::size_t>(drafts.confidence);
    return std::min(static_cast<int>(drafts.tokens.size()), by_confidence.at(confidence));
}

// Of emitted token `index` of `slot`, and of the `top` likeliest tokens there.
TokenLogprobs logprobs_of(const Logprobs& logprobs, int slot, std::size_t index, int top) {
    const std::size_t row = static_cast<std::size_t>(slot) * logprobs.max_emitted + index;
    TokenLogprobs result{logprobs.chosen[row], {}};
    for (std::size_t i = 0; i < std::min(static_cast<std::size_t>(top), logprobs.top); ++i) {
        const std::size_t entry = row * logprobs.top + i;
        result.top.emplace_back(logprobs.ids[entry], logprobs.values[entry]);
    }
    return result;
}

}  // namespace

PlanChoice choose_plan(const std::string& name, int lookahead,
                       const std::optional<std::string>& draft, int longest_copy) {
    if (name == "auto" && lookahead > 0) {
        const std::string source = draft.value_or("both");
        return {"auto", std::nullopt, source == "ngram" ? 0 : lookahead,
                source == "lookahead" ? 0 : longest_copy};
    }
    const Plan plan = make_plan(name == "auto" ? "ar" : name, lookahead);
    const int drafts = plan.drafts();
    if (!draft || *draft == "lookahead" || lookahead == 0) return {plan.name, plan, drafts, 0};
    if (name == "ar") {
        throw Error("the plan ar takes no drafts, so --draft " + *draft +
                    " needs another one: two-pass, fused or auto");
    }
    if (*draft == "ngram") return {"ngram", make_plan("ar", 0), 0, longest_copy};
    return {plan.name + "+ngram", plan, drafts, longest_copy};
}

PromptChunk next_chunk(const Capabilities& capabilities, std::int64_t cached,
                       std::int64_t remaining, std::int64_t capacity,
                       std::optional<std::int64_t> max_rows) {
    std::vector<int> widths = capabilities.chunks(cached, capacity);
    const int narrowest = widths.back();
    std::erase_if(widths, [&](int width) { return width > max_rows.value_or(width); });
    if (widths.empty()) widths.push_back(narrowest);
    int narrowest_holding = 0, widest_filled = 0;
    for (int width : widths) {  // in falling order
        if (width >= remaining) narrowest_holding = width;
        if (width <= remaining && widest_filled == 0) widest_filled = width;
    }
    const bool nearly_full = 4 * remaining >= std::int64_t{3} * narrowest_holding;
    if (narrowest_holding > 0 && (nearly_full || widest_filled == 1))
        return {remaining, narrowest_holding};
    return {widest_filled, widest_filled};
}

void Engine::add(std::shared_ptr<SequenceState> sequence) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(sequence));
}

bool Engine::step() {
    drop_cancelled();
    admit();
    read_prompts();
    try {
        if (std::vector<Slot*> slots = slots_.compact(); !slots.empty()) decode(std::move(slots));
    } catch (...) {  // a pass runs all sequences together, so it fails for all of them
        const End end = error_end();
        for (Slot* slot : slots_.decoding()) finish(*slot, end);
    }
    return first_waiting() != nullptr || !slots_.busy().empty();
}

void Engine::end_all(const End& end) noexcept {
    const End cancelled{FinishReason::cancelled, {}, nullptr};
    for (Slot& slot : slots_.all()) {
        if (slot.sequence != nullptr) finish(slot, slot.sequence->cancelled ? cancelled : end);
    }
    while (std::shared_ptr<SequenceState> sequence = first_waiting()) {
        sequence->finish(sequence->cancelled ? cancelled : end);
        const std::lock_guard lock(mutex_);
        waiting_.pop_front();
    }
}

std::shared_ptr<SequenceState> Engine::first_waiting() noexcept {
    const std::lock_guard lock(mutex_);
    return waiting_.empty() ? nullptr : waiting_.front();
}

void Engine::drop_cancelled() {
    const End end{FinishReason::cancelled, {}, nullptr};
    for (Slot* slot : slots_.busy()) {
        if (slot->sequence->cancelled) finish(*slot, end);
    }
    std::vector<std::shared_ptr<SequenceState>> dropped;
    {
        const std::lock_guard lock(mutex_);
        std::erase_if(waiting_, [&](const std::shared_ptr<SequenceState>& sequence) {
            const bool cancelled = sequence->cancelled;
            if (cancelled) dropped.push_back(sequence);
            return cancelled;
        });
    }
    for (const std::shared_ptr<SequenceState>& sequence : dropped) sequence->finish(end);
}

void Engine::admit() {
    while (const std::shared_ptr<SequenceState> sequence = first_waiting()) {
        if (!slots_.fits(sequence->request.prompt_ids.size())) {
            sequence->finish({FinishReason::length, {}, nullptr});
        } else {
            try {
                if (!slots_.admit(sequence)) return;
            } catch (...) {
                sequence->finish(error_end());
            }
        }
        const std::lock_guard lock(mutex_);
        waiting_.pop_front();
    }
}

// The oldest first. If no sequence decodes, one chunk of any width, because new requests are
// admitted only between steps.
void Engine::read_prompts() {
    std::vector<Slot*> reading = slots_.busy();
    std::erase_if(reading, [](const Slot* slot) { return slot->sequence->prefilled(); });
    std::sort(reading.begin(), reading.end(), [](const Slot* a, const Slot* b) {
        return a->sequence->admission_number < b->sequence->admission_number;
    });
    const std::optional<std::int64_t> limit =
        slots_.decoding().empty() ? std::nullopt : std::optional(max_prompt_tokens);
    std::int64_t tokens = 0;
    for (Slot* slot : reading) {
        try {
            slots_.share(*slot);  // an older sequence may have read the same prompt by now
            while (!slot->sequence->prefilled()) {
                if (tokens > 0 && tokens >= limit.value_or(0)) return;
                tokens += prefill(*slot, limit);
            }
        } catch (...) {
            finish(*slot, error_end());
        }
    }
}

// Read one chunk. Returns how many tokens it has.
std::int64_t Engine::prefill(Slot& slot, std::optional<std::int64_t> max_rows) {
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
    sequence.cached += count;
    slot.masked = false;  // to be masked again with its new length
    sequence.stats.prefill_seconds += done - started;
    return count;
}

void Engine::decode(std::vector<Slot*> slots) {
    Batch batch = batch_of(std::move(slots));
    if (!choose_window(batch)) {
        end_longest(batch.slots, {FinishReason::length, {}, nullptr});
        return;
    }
    try {
        slots_.make_room(batch.window, batch.size);
    } catch (...) {
        end_longest(batch.slots, error_end());
        return;
    }
    apply(batch, run(batch));
}

// All sequences get one plan: that of the oldest request that names one, else the tuner's choice.
Engine::Batch Engine::batch_of(std::vector<Slot*> slots) {
    Batch batch{std::move(slots)};
    batch.size = backend_.capabilities().batch_size(batch.slots.back()->number + 1);
    const SequenceState* oldest = nullptr;
    int lookahead = 0;
    for (const Slot* slot : batch.slots) {
        const SequenceState& sequence = *slot->sequence;
        batch.sampler = std::max(batch.sampler, sequence.request.sampling.sampler());
        lookahead = std::max(lookahead, sequence.request.lookahead_drafts);
        if (sequence.request.plan &&
            (oldest == nullptr || sequence.admission_number < oldest->admission_number))
            oldest = &sequence;
    }
    if (static_cast<std::int64_t>(batch.slots.size()) >
        max_concurrency_.value_or(backend_.capabilities().slots()))
        return batch;
    batch.tuner = tuner_for(batch);
    if (oldest == nullptr && batch.tuner == nullptr) return batch;
    for (const Slot* slot : batch.slots) batch.states.push_back(draft_state_of(*slot));
    if (oldest == nullptr) batch.choice = batch.tuner->choose(lookahead, batch.size, batch.states);
    batch.plan = oldest == nullptr ? batch.choice->plan : *oldest->request.plan;
    return batch;
}

// Null if all sequences name plans, or if passes are not timed yet (others then decode plainly).
// Timing waits until each sequence has its first token, and until the cache has room.
Tuner* Engine::tuner_for(const Batch& batch) {
    const auto all = [&](const auto& test) {
        return std::all_of(batch.slots.begin(), batch.slots.end(),
                           [&](const Slot* slot) { return test(*slot->sequence); });
    };
    if (all([](const SequenceState& sequence) { return sequence.request.plan.has_value(); }))
        return nullptr;
    if (!all([](const SequenceState& sequence) { return sequence.stats.passes > 0; }) &&
        !auto_.is_timed(batch.sampler, batch.size))
        return nullptr;
    Tuner* tuner = timed_tuner(batch.sampler, batch.size);
    for (Slot* slot : batch.slots) {
        if (tuner != nullptr && !slot->sequence->rates)
            slot->sequence->rates.emplace(tuner->rates());
    }
    return tuner;
}

Tuner* Engine::timed_tuner(Sampler sampler, int batch) {
    return auto_.tuner(sampler, batch, slots_.room(), [&](const Window& window, int size) {
        return time_masked_pass({window, size, sampler});
    });
}

// The plan's next window, or one that only verifies n-gram drafts, and the drafts.
bool Engine::choose_window(Batch& batch) {
    const std::optional<Window> planned = next_of_plan(batch);
    if (!planned) return false;
    const std::optional<Window> chosen = verifying(batch, *planned);
    batch.window = chosen.value_or(*planned);
    for (std::size_t i = 0; i < batch.states.size(); ++i) {
        const DraftState& state = batch.states[i];
        if (state.ngram.tokens.empty()) continue;
        const bool is_wanted =
            chosen ||
            (planned->drafts > 0 && (batch.choice ? batch.tuner->prefers_ngrams(state, *planned)
                                                  : worth_drafting(state.ngram) > 0));
        if (is_wanted) {
            batch.drafts[batch.slots[i]->number] =
                first_of(state.ngram.tokens, batch.window.drafts);
        } else if (batch.tuner != nullptr) {
            batch.tuner->forget_unverified(state);
        }
    }
    return true;
}

// The staged window, or the plan's first; of a narrower plan if the passes up to the plan's last
// window do not fit the cache, or the backend cannot run them.
std::optional<Window> Engine::next_of_plan(const Batch& batch) {
    for (Plan plan = batch.plan;; plan = plan.narrower()) {
        const Window* first = &plan.windows.front();
        for (const Window* window : {staged_of(batch, plan), first}) {
            if (window == nullptr || !fits(plan.reach(*window)) ||
                !backend_.capabilities().allows(plan.windows))
                continue;
            return *window;
        }
        if (plan.drafts() == 0) return std::nullopt;
    }
}

// None if the plan's next window is as good.
std::optional<Window> Engine::verifying(const Batch& batch, const Window& next_of_plan) {
    const auto has_ngrams = [](const DraftState& state) { return !state.ngram.tokens.empty(); };
    if (std::none_of(batch.states.begin(), batch.states.end(), has_ngrams)) return std::nullopt;
    std::vector<Window> windows = backend_.capabilities().verifying;
    std::erase_if(windows, [&](const Window& window) { return !fits(window.width()); });
    if (batch.choice) {
        const Window* best =
            batch.tuner->verifying(*batch.choice, batch.size, batch.states, next_of_plan, windows);
        return best == nullptr ? std::nullopt : std::optional(*best);
    }
    int most = 0;
    for (const DraftState& state : batch.states) most = std::max(most, worth_drafting(state.ngram));
    std::optional<Window> widest;
    for (const Window& window : windows) {
        if (most <= next_of_plan.drafts || window.drafts <= next_of_plan.drafts) continue;
        widest = window;
        if (window.drafts >= most) break;
    }
    return widest;
}

const Window* Engine::staged_of(const Batch& batch, const Plan& plan) const {
    const bool any_staged = std::any_of(batch.slots.begin(), batch.slots.end(),
                                        [](const Slot* slot) { return slot->staged; });
    const bool usable = any_staged && staged_window_ && plan.contains(*staged_window_);
    return usable ? &*staged_window_ : nullptr;
}

bool Engine::fits(int width) {
    return backend_.capabilities().padded_width(width) <= slots_.room();
}

Engine::PassResult Engine::run(const Batch& batch) {
    PassKind kind{batch.window, batch.size, batch.sampler};
    for (const Slot* slot : batch.slots) {
        SequenceState& sequence = *slot->sequence;
        kind.logprobs = kind.logprobs || sequence.request.logprobs;
        if (!sequence.processors) continue;
        kind.touched_count =
            std::max(kind.touched_count,
                     sequence.processors->list_size(sequence.tokens, batch.window.drafts));
    }
    // Under the rejection rule, windows from another sampler's tail may lack the draft
    // probabilities that this sampler's tail needs.
    if (kind.sampler != sampler_ && backend_.manifest().rule == "rejection") staged_window_.reset();
    sampler_ = kind.sampler;
    stage(kind, batch.drafts);
    if (kind.touched_count > 0) set_processors(kind, batch.slots);
    staged_window_.reset();  // until the pass is done
    const double started = now();
    for (Slot* slot : batch.slots) {
        if (slot->sequence->decoding_since) continue;
        slot->sequence->decoding_since = started;
        slot->sequence->engine_seconds_before = engine_seconds_;
    }
    const std::vector<std::vector<std::int64_t>> emitted = backend_.run(kind);
    PassResult result{.tokens = {}, .verified = {}, .seconds = now() - started};
    engine_seconds_ += result.seconds;
    std::optional<Logprobs> logprobs;
    if (kind.logprobs) logprobs = backend_.logprobs(kind);
    // All results are computed before any is recorded, so that a failure changes no record.
    for (std::size_t number = 0; number < batch.slots.size(); ++number) {
        const Slot* slot = batch.slots[number];
        const std::vector<std::int64_t>& ids = emitted[static_cast<std::size_t>(slot->number)];
        const std::optional<int>& top = slot->sequence->request.logprobs;
        std::vector<Token>& tokens = result.tokens.emplace_back();
        for (std::size_t i = 0; i < ids.size(); ++i) {  // the last one is the bonus token
            Token& token = tokens.emplace_back();
            token.id = ids[i];
            if (i + 1 < ids.size()) token.source = slot->source;
            if (top) token.logprobs = logprobs_of(*logprobs, slot->number, i, *top);
        }
        Verified& verified = result.verified.emplace_back();
        verified.drafted = slot->num_drafts;
        verified.accepted = static_cast<int>(ids.size()) - 1;
        if (slot->sequence->rates) verified.rates = &*slot->sequence->rates;
        if (batch.drafts.contains(slot->number))
            verified.confidence = batch.states[number].ngram.confidence;
    }
    std::optional<Window> next = batch.window.next();
    for (std::size_t i = 0; i < batch.slots.size(); ++i) {
        Slot& slot = *batch.slots[i];
        const int accepted = result.verified[i].accepted;
        slot.sequence->cached += accepted + 1;
        slot.sequence->stats.engine_seconds =
            engine_seconds_ - slot.sequence->engine_seconds_before;
        slot.num_drafts = batch.window.next_drafts(accepted);
        slot.source = TokenSource::lookahead;
    }
    staged_window_.swap(next);
    return result;
}

void Engine::apply(const Batch& batch, PassResult result) {
    if (batch.tuner != nullptr)
        batch.tuner->observe(batch.window, batch.size, result.seconds, result.verified);
    for (std::size_t i = 0; i < batch.slots.size(); ++i) {
        SequenceState& sequence = *batch.slots[i]->sequence;
        sequence.stats.record(result.verified[i].drafted, result.verified[i].accepted + 1);
        if (sequence.processors_error != nullptr) {
            sequence.finish({FinishReason::error, {}, sequence.processors_error});
            continue;
        }
        try {
            sequence.write(std::move(result.tokens[i]));
        } catch (...) {  // from its detokenizer
            sequence.finish(error_end());
        }
    }
    for (Slot* slot : batch.slots) {
        if (slot->sequence->finished) slots_.release(*slot);
    }
}

// Write the windows that differ from those on the device, and mask the slots that take no part.
void Engine::stage(const PassKind& kind, const std::map<int, Drafts>& drafts) {
    for (int i = 0; i < kind.batch; ++i) {
        Slot& slot = slots_.all()[static_cast<std::size_t>(i)];
        if (slot.sequence == nullptr || !slot.sequence->prefilled()) {
            if (!slot.masked) mask(slot);
            continue;
        }
        const auto given = drafts.find(slot.number);
        if (staged_window_ == kind.window && slot.staged && given == drafts.end()) continue;
        const Drafts& ngrams = given != drafts.end() ? given->second : Drafts{};
        slot.staged = false;
        backend_.stage(slot.number, kind.window, slot.sequence->cached,
                       slot.sequence->tokens.back(), ngrams);
        slot.num_drafts = static_cast<int>(ngrams.size());
        slot.source = TokenSource::ngram;
        slot.staged = true;
        slot.masked = false;
    }
}

void Engine::set_processors(const PassKind& kind, const std::vector<Slot*>& slots) {
    const std::vector<std::vector<std::int64_t>> drafts = backend_.drafts(kind.window, kind.batch);
    const ProcessedRows nothing = no_processing(backend_.capabilities().vocab_size,
                                                kind.window.drafts + 1, kind.touched_count);
    for (int slot = 0; slot < kind.batch; ++slot) backend_.set_processors(slot, nothing);
    for (const Slot* slot : slots) {
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

void Engine::mask(Slot& slot) {
    slot.staged = slot.masked = false;
    backend_.mask(slot.number, slot.cached());
    slot.masked = true;
}

// Write some window in every slot of a pass, and mask these slots, so that it changes no sequence.
void Engine::stage_masked(const PassKind& kind) {
    slots_.make_room(kind.window, kind.batch);
    staged_window_.reset();
    for (int i = 0; i < kind.batch; ++i) {
        Slot& slot = slots_.all()[static_cast<std::size_t>(i)];
        backend_.stage(slot.number, kind.window, slot.cached(), 0);
        mask(slot);
    }
}

PassSeconds Engine::time_masked_pass(const PassKind& kind) {
    stage_masked(kind);
    const double started = now();
    backend_.run_trunk(kind.window, kind.batch);
    const double trunk_done = now();
    backend_.run_tail(kind);
    const double done = now();
    engine_seconds_ += done - started;
    return {trunk_done - started, done - trunk_done};
}

void Engine::run_all_passes(std::int64_t max_kept, std::int64_t capacity, int batch,
                            const std::vector<Sampler>& samplers) {
    const Capabilities& capabilities = backend_.capabilities();
    const auto has_room = [&](int width) {
        return max_kept + capabilities.padded_width(width) <= capacity;
    };
    const int lookahead = static_cast<int>(backend_.manifest().lookahead.length);
    for (const Window& window : capabilities.plan_windows(lookahead)) {
        if (!has_room(window.width())) continue;
        for (Sampler sampler : samplers) {
            const PassKind kind{window, batch, sampler};
            stage_masked(kind);
            for (int run = 0; run < runs_until_captured; ++run) backend_.run(kind);
        }
    }
    const std::vector<std::int64_t> token{0};
    int smaller_batch = 0;  // the next smaller batch size
    for (int size : capabilities.batch_sizes) smaller_batch = size < batch ? size : smaller_batch;
    for (int slot = smaller_batch; slot < batch; ++slot) {
        for (int width : capabilities.chunks(max_kept, capacity)) {
            for (int run = 0; has_room(width) && run < runs_until_captured; ++run) {
                backend_.prefill(slot, slots_.all()[static_cast<std::size_t>(slot)].cached(), token,
                                 width);
            }
        }
    }
}

void Engine::capture_graphs(std::int64_t capacity, int batch,
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

void Engine::end_longest(const std::vector<Slot*>& slots, const End& end) {
    finish(
        **std::max_element(slots.begin(), slots.end(),
                           [](const Slot* a, const Slot* b) { return a->cached() < b->cached(); }),
        end);
}

void Engine::finish(Slot& slot, const End& end) noexcept {
    const std::shared_ptr<SequenceState> sequence = slot.sequence;
    slots_.release(slot);
    if (sequence != nullptr) sequence->finish(end);
}

}  // namespace pass
