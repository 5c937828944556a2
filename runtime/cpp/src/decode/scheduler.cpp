#include "decode/scheduler.h"

#include <algorithm>
#include <new>

#include "backends/memory.h"
#include "decode/expected_rate.h"
#include "errors.h"

namespace pass {

namespace {

constexpr std::int64_t max_prompt_tokens = 64;  // that a step reads while other sequences decode

// The current exception, as the end that a reader gets.
End failed() {
    try {
        throw;
    } catch (const std::bad_alloc&) {
        return {FinishReason::error, {}, std::make_exception_ptr(out_of_memory())};
    } catch (...) {
        return {FinishReason::error, {}, std::current_exception()};
    }
}

// Whether drafts may be trees: the last bits of second choices are not those of a chain. The graphs of
// log-probabilities and of processors read the rows of a chain.
bool takes_a_tree(const ResolvedRequest& request) {
    return (!request.cycle || request.cycle->is_tree()) && !request.logprobs && !request.processing;
}

DraftState draft_state_of(const Slot& slot) {
    if (!slot.sequence->index) return {slot.num_drafts, {}, 0, nullptr};
    const NgramIndex& index = *slot.sequence->index;
    return {slot.num_drafts, index.propose(slot.sequence->request.ngram_drafts), index.matched(),
            &slot.sequence->ngrams};
}

// Update the tuner with the time of a pass and with the drafts that were accepted.
void observe(PlanTuner& tuner, const Plan& plan, int batch, double seconds, const std::vector<StepResult>& results,
             const std::vector<DraftState>& states) {
    tuner.observe(plan, batch, seconds);
    bool drafted = false;
    for (std::size_t i = 0; i < results.size(); ++i) {
        const StepResult& result = results[i];
        const int accepted = result.chain;
        if (result.drafted == 0) continue;
        drafted = true;
        if (result.source == TokenSource::ngram) {
            tuner.ngram(states[i].matched, states[i].ngrams).record(result.drafted, accepted);
            tuner.ngram(states[i].matched).record(result.drafted, accepted);
            continue;
        }
        tuner.drafts().record(result.drafted, accepted);
        if (result.sequence->acceptance) result.sequence->acceptance->record(result.drafted, accepted);
    }
    if (!plan.groups.empty() || drafted) return;
    tuner.drafts().forget();
    for (const StepResult& result : results) {
        if (result.sequence->acceptance) result.sequence->acceptance->forget();
    }
}

}  // namespace

void Scheduler::add(std::shared_ptr<SequenceState> sequence) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(sequence));
}

std::size_t Scheduler::waiting() const {
    const std::lock_guard lock(mutex_);
    return waiting_.size();
}

bool Scheduler::step() {
    drop_cancelled();
    admit();
    prefill();
    try {
        if (const std::vector<Slot*> active = slots_.gather(); !active.empty()) decode(active);
    } catch (...) {  // the pass ran over all of them, so it failed for all of them
        const End end = failed();
        for (Slot* slot : slots_.decoding()) finish(*slot, end);
    }
    return waiting() > 0 || !slots_.busy().empty();
}

void Scheduler::end_all(const End& end) {
    const End cancelled{FinishReason::cancelled, {}, nullptr};
    for (Slot* slot : slots_.busy()) finish(*slot, slot->sequence->cancelled ? cancelled : end);
    while (std::shared_ptr<SequenceState> sequence = first_waiting()) {
        sequence->finish(sequence->cancelled ? cancelled : end);
        const std::lock_guard lock(mutex_);
        waiting_.pop_front();
    }
}

std::shared_ptr<SequenceState> Scheduler::first_waiting() {
    const std::lock_guard lock(mutex_);
    return waiting_.empty() ? nullptr : waiting_.front();
}

void Scheduler::drop_cancelled() {
    const End end{FinishReason::cancelled, {}, nullptr};
    for (Slot* slot : slots_.busy()) {
        if (slot->sequence->cancelled) finish(*slot, end);
    }
    std::vector<std::shared_ptr<SequenceState>> dropped;
    {
        const std::lock_guard lock(mutex_);
        for (auto sequence = waiting_.begin(); sequence != waiting_.end();) {
            if (!(*sequence)->cancelled) {
                ++sequence;
                continue;
            }
            dropped.push_back(std::move(*sequence));
            sequence = waiting_.erase(sequence);
        }
    }
    for (const std::shared_ptr<SequenceState>& sequence : dropped) sequence->finish(end);
}

void Scheduler::admit() {
    while (const std::shared_ptr<SequenceState> sequence = first_waiting()) {
        if (!slots_.fits(sequence->request.prompt_ids.size())) {
            sequence->finish({FinishReason::length, {}, nullptr});
        } else {
            try {
                if (!slots_.admit(sequence)) return;
            } catch (...) {
                sequence->finish(failed());
            }
        }
        const std::lock_guard lock(mutex_);
        waiting_.pop_front();
    }
}

// Read chunks of prompts, the oldest request first; wide chunks if no sequence is decoding.
void Scheduler::prefill() {
    std::vector<Slot*> reading;
    for (Slot* slot : slots_.busy()) {
        if (!slot->sequence->prefilled()) reading.push_back(slot);
    }
    std::sort(reading.begin(), reading.end(),
              [](const Slot* a, const Slot* b) { return a->sequence->admitted < b->sequence->admitted; });
    const bool alone = slots_.decoding().empty();
    const std::optional<std::int64_t> most = alone ? std::nullopt : std::optional(max_prompt_tokens);
    std::int64_t read = 0;
    for (Slot* slot : reading) {
        try {
            slots_.share(*slot);  // an older sequence with the same prompt has read it by now
            while (!slot->sequence->prefilled()) {
                // Stop after a chunk, so that others decode and cancellations are seen.
                if (read > 0 && (alone || read >= max_prompt_tokens)) return;
                read += runner_.prefill(*slot, most);
            }
        } catch (...) {
            finish(*slot, failed());
        }
    }
}

void Scheduler::decode(const std::vector<Slot*>& active) {
    const int batch = runner_.batch(active);
    const bool may_draft = !max_concurrency_ || static_cast<std::int64_t>(active.size()) <= *max_concurrency_;
    PlanTuner* known = may_draft ? tuner(active, batch) : nullptr;
    std::vector<DraftState> states;
    for (const Slot* slot : active) states.push_back(draft_state_of(*slot));
    const std::optional<Pass> chosen = choose(active, states, known, batch, may_draft);
    if (!chosen) {
        end_longest(active, {FinishReason::length, {}, nullptr});
        return;
    }
    std::map<int, Drafts> drafts;
    for (std::size_t i = 0; i < active.size(); ++i) {
        if (chosen->drafts[i]) drafts[active[i]->number] = *chosen->drafts[i];
    }
    try {
        slots_.make_room(chosen->plan, batch);
    } catch (...) {
        end_longest(active, failed());
        return;
    }
    auto [results, seconds] = runner_.run(chosen->plan, drafts);
    if (known != nullptr) observe(*known, chosen->plan, batch, seconds, results, states);
    deliver(std::move(results));
}

// The next pass. A pass runs one plan for the whole batch: that of the oldest request that names one, else the fastest.
// A tree becomes a chain if one of the requests did not ask for it.
std::optional<Pass> Scheduler::choose(const std::vector<Slot*>& active, const std::vector<DraftState>& states,
                                      PlanTuner* known, int batch, bool may_draft) {
    const SequenceState* oldest = nullptr;
    int most = 0;
    bool take_trees = true;
    std::vector<const Acceptance*> accepted;
    for (const Slot* slot : active) {
        const SequenceState& sequence = *slot->sequence;
        if (sequence.request.cycle && (oldest == nullptr || sequence.admitted < oldest->admitted)) oldest = &sequence;
        most = std::max(most, sequence.request.lookahead);
        if (sequence.acceptance) accepted.push_back(&*sequence.acceptance);
        take_trees = take_trees && takes_a_tree(sequence.request);
    }
    // If all sequences have just been admitted no window is on the device, whatever plan ran last: the cycle begins
    // anew.
    const bool staged = std::any_of(active.begin(), active.end(), [](const Slot* slot) { return slot->staged; });
    const Plan* window = staged && runner_.window() ? &*runner_.window() : nullptr;
    const auto allowed = [&](const Cycle& cycle) { return cycle.is_tree() && !take_trees ? cycle.narrower() : cycle; };
    if (oldest != nullptr && may_draft) {
        AlwaysDraft policy;
        return next_pass(allowed(*oldest->request.cycle), window, slots_.room(), runner_.backend().capabilities(),
                         states, policy);
    }
    if (known == nullptr) {
        AlwaysDraft policy;
        return next_pass(make_cycle("ar", 0), window, slots_.room(), runner_.backend().capabilities(),
                         std::vector<DraftState>(states.size()), policy);
    }
    const Candidate decided = known->mode(most, batch, accepted);
    ExpectedRate policy(*known, decided, batch);
    return next_pass(allowed(decided.cycle), window, slots_.room(), runner_.backend().capabilities(), states, policy);
}

// The tuner for these requests, if one of them leaves the plan open (`auto`). Null if passes would have to be
// timed first and a request has no token yet, so that its first token does not wait for that; and null while the KV
// cache has no room to time passes. These requests are then decoded plainly.
PlanTuner* Scheduler::tuner(const std::vector<Slot*>& active, int batch) {
    const bool open = std::any_of(active.begin(), active.end(),
                                  [](const Slot* slot) { return !slot->sequence->request.cycle.has_value(); });
    if (!open) return nullptr;
    const Sampler sampler = Runner::sampler(active);
    const bool begun =
        std::all_of(active.begin(), active.end(), [](const Slot* slot) { return slot->sequence->stats.passes > 0; });
    if (!begun && !tuners_.known(sampler, batch)) return nullptr;
    PlanTuner* known = tuners_.get(sampler, batch);
    if (known == nullptr) return nullptr;
    for (const Slot* slot : active) {
        if (!slot->sequence->acceptance) slot->sequence->acceptance = known->new_acceptance();
    }
    return known;
}

void Scheduler::deliver(std::vector<StepResult> results) {
    for (StepResult& result : results) {
        SequenceState& sequence = *result.sequence;
        sequence.stats.record(result.drafted, static_cast<int>(result.tokens.size()));
        if (sequence.problem != nullptr) {
            sequence.finish({FinishReason::error, {}, sequence.problem});
            continue;
        }
        try {
            sequence.write(std::move(result.tokens));
        } catch (...) {  // from turning its tokens into text
            sequence.finish(failed());
        }
    }
    for (Slot* slot : slots_.busy()) {
        if (slot->sequence->finished) slots_.release(*slot);
    }
}

void Scheduler::end_longest(const std::vector<Slot*>& active, const End& end) {
    finish(**std::max_element(active.begin(), active.end(),
                              [](const Slot* a, const Slot* b) { return a->cached() < b->cached(); }),
           end);
}

void Scheduler::finish(Slot& slot, const End& end) {
    const std::shared_ptr<SequenceState> sequence = slot.sequence;
    slots_.release(slot);
    if (sequence != nullptr) sequence->finish(end);
}

}  // namespace pass
