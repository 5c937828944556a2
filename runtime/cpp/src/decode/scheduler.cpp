#include "decode/scheduler.h"

#include <algorithm>

#include "decode/expected_rate.h"
#include "errors.h"

namespace pass {

namespace {

// While sequences decode, a step begins no prompt chunk after this many tokens; none is wider.
constexpr std::int64_t max_prompt_tokens = 64;

// Whether a request may be decoded with trees. One that names a chain may not, because second
// choices round differently. The graphs of log-probabilities and processors read only chains' rows.
bool allows_tree(const ResolvedRequest& request) {
    return (!request.cycle || request.cycle->is_tree()) && !request.logprobs && !request.processing;
}

DraftState draft_state_of(const Slot& slot) {
    if (!slot.sequence->ngram_index) return {slot.num_drafts, {}, 0, nullptr};
    const NgramIndex& index = *slot.sequence->ngram_index;
    return {slot.num_drafts, index.propose(slot.sequence->request.ngram_drafts),
            index.match_length(), &slot.sequence->ngram_acceptance};
}

// Record in the tuner how long a pass took, and how many of its drafts were accepted.
void observe(Tuner& tuner, const Plan& plan, int batch, double seconds,
             const std::vector<SlotResult>& results, const std::vector<DraftState>& states) {
    tuner.observe(plan, batch, seconds);
    bool any_drafted = false;
    for (std::size_t i = 0; i < results.size(); ++i) {
        const SlotResult& result = results[i];
        const int accepted = result.accepted_first_choices;
        if (result.drafted == 0) continue;
        any_drafted = true;
        if (result.source == TokenSource::ngram) {
            tuner.ngram(states[i].match_length, states[i].ngram_acceptance)
                .record(result.drafted, accepted);
            tuner.ngram(states[i].match_length).record(result.drafted, accepted);
            continue;
        }
        tuner.lookahead_acceptance().record(result.drafted, accepted);
        if (result.sequence->lookahead_acceptance)
            result.sequence->lookahead_acceptance->record(result.drafted, accepted);
    }
    if (!plan.groups.empty() || any_drafted) return;
    // After many plain passes, the rates of look-ahead drafts are out of date.
    tuner.lookahead_acceptance().forget();
    for (const SlotResult& result : results) {
        if (result.sequence->lookahead_acceptance) result.sequence->lookahead_acceptance->forget();
    }
}

}  // namespace

void Scheduler::add(std::shared_ptr<SequenceState> sequence) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(sequence));
}

bool Scheduler::step() {
    drop_cancelled();
    admit();
    prefill();
    try {
        if (const std::vector<Slot*> active = slots_.compact(); !active.empty()) decode(active);
    } catch (...) {  // a pass runs all sequences together, so it fails for all of them
        const End end = error_end();
        for (Slot* slot : slots_.decoding()) finish(*slot, end);
    }
    return first_waiting() != nullptr || !slots_.busy().empty();
}

void Scheduler::end_all(const End& end) noexcept {
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

std::shared_ptr<SequenceState> Scheduler::first_waiting() noexcept {
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
                sequence->finish(error_end());
            }
        }
        const std::lock_guard lock(mutex_);
        waiting_.pop_front();
    }
}

// Prefill prompt chunks, those of the oldest sequence first. If no sequence decodes, prefill one
// chunk of any width, because new requests are admitted only between steps.
void Scheduler::prefill() {
    std::vector<Slot*> prefilling;
    for (Slot* slot : slots_.busy()) {
        if (!slot->sequence->prefilled()) prefilling.push_back(slot);
    }
    std::sort(prefilling.begin(), prefilling.end(), [](const Slot* a, const Slot* b) {
        return a->sequence->admission_number < b->sequence->admission_number;
    });
    const std::optional<std::int64_t> limit =
        slots_.decoding().empty() ? std::nullopt : std::optional(max_prompt_tokens);
    std::int64_t tokens = 0;
    for (Slot* slot : prefilling) {
        try {
            slots_.share(*slot);  // an older sequence may have read the same prompt by now
            while (!slot->sequence->prefilled()) {
                if (tokens > 0 && tokens >= limit.value_or(0)) return;
                tokens += runner_.prefill(*slot, limit);
            }
        } catch (...) {
            finish(*slot, error_end());
        }
    }
}

void Scheduler::decode(const std::vector<Slot*>& active) {
    const int batch = runner_.batch(active);
    const bool may_draft =
        !max_concurrency_ || static_cast<std::int64_t>(active.size()) <= *max_concurrency_;
    Tuner* tuner = may_draft ? tuner_for(active, batch) : nullptr;
    std::vector<DraftState> states;
    for (const Slot* slot : active) states.push_back(draft_state_of(*slot));
    const std::optional<NextPass> chosen = choose_pass(active, states, tuner, batch, may_draft);
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
        end_longest(active, error_end());
        return;
    }
    auto [results, seconds] = runner_.run(chosen->plan, drafts);
    if (tuner != nullptr) observe(*tuner, chosen->plan, batch, seconds, results, states);
    deliver(std::move(results));
}

// The next pass; none if not even a plain one fits. All sequences get one plan: that of the oldest
// request that names one, else the tuner's choice; a chain if any request does not allow trees.
std::optional<NextPass> Scheduler::choose_pass(const std::vector<Slot*>& active,
                                               const std::vector<DraftState>& states, Tuner* tuner,
                                               int batch, bool may_draft) {
    const SequenceState* oldest = nullptr;
    int lookahead = 0;
    bool allow_trees = true;
    std::vector<const ConditionalAcceptance*> acceptances;
    for (const Slot* slot : active) {
        const SequenceState& sequence = *slot->sequence;
        if (sequence.request.cycle &&
            (oldest == nullptr || sequence.admission_number < oldest->admission_number))
            oldest = &sequence;
        lookahead = std::max(lookahead, sequence.request.lookahead_drafts);
        if (sequence.lookahead_acceptance) acceptances.push_back(&*sequence.lookahead_acceptance);
        allow_trees = allow_trees && allows_tree(sequence.request);
    }
    std::optional<Cycle> cycle;
    std::unique_ptr<DraftPolicy> policy = std::make_unique<DraftPolicy>();
    Candidate candidate;  // an `ExpectedRate` refers to it
    if (oldest != nullptr && may_draft) {
        cycle = oldest->request.cycle;
    } else if (tuner != nullptr) {
        candidate = tuner->next_candidate(lookahead, batch, acceptances);
        cycle = candidate.cycle;
        policy = std::make_unique<ExpectedRate>(*tuner, candidate, batch);
    }
    if (cycle && cycle->is_tree() && !allow_trees) cycle = cycle->narrower();
    // If all sequences are new, no window is staged, and the cycle begins with its first plan.
    const bool any_staged =
        std::any_of(active.begin(), active.end(), [](const Slot* slot) { return slot->staged; });
    const Plan* staged_plan =
        any_staged && runner_.staged_plan() ? &*runner_.staged_plan() : nullptr;
    const std::vector<DraftState> no_drafts(states.size());
    const Situation situation{.cycle = cycle ? *cycle : make_cycle("ar", 0),
                              .staged_plan = staged_plan,
                              .room = slots_.room(),
                              .capabilities = runner_.backend().capabilities(),
                              .states = cycle ? states : no_drafts,
                              .policy = *policy};
    return situation.next_pass();
}

// The tuner for these sequences; null if all of them name plans, or if passes are not timed yet
// (sequences that name none then decode plainly). Timing waits until each sequence has its first
// token, and until the KV cache has room for the timed passes.
Tuner* Scheduler::tuner_for(const std::vector<Slot*>& active, int batch) {
    const bool all_named = std::all_of(active.begin(), active.end(), [](const Slot* slot) {
        return slot->sequence->request.cycle.has_value();
    });
    if (all_named) return nullptr;
    const Sampler sampler = Runner::sampler(active);
    const bool all_begun = std::all_of(active.begin(), active.end(), [](const Slot* slot) {
        return slot->sequence->stats.passes > 0;
    });
    if (!all_begun && !tuners_.is_timed(sampler, batch)) return nullptr;
    Tuner* tuner = tuners_.get(sampler, batch);
    if (tuner == nullptr) return nullptr;
    for (const Slot* slot : active) {
        if (!slot->sequence->lookahead_acceptance)
            slot->sequence->lookahead_acceptance = tuner->new_acceptance();
    }
    return tuner;
}

void Scheduler::deliver(std::vector<SlotResult> results) {
    for (SlotResult& result : results) {
        SequenceState& sequence = *result.sequence;
        sequence.stats.record(result.drafted, static_cast<int>(result.tokens.size()));
        if (sequence.processors_error != nullptr) {
            sequence.finish({FinishReason::error, {}, sequence.processors_error});
            continue;
        }
        try {
            sequence.write(std::move(result.tokens));
        } catch (...) {  // from its detokenizer
            sequence.finish(error_end());
        }
    }
    for (Slot* slot : slots_.busy()) {
        if (slot->sequence->finished) slots_.release(*slot);
    }
}

void Scheduler::end_longest(const std::vector<Slot*>& active, const End& end) {
    finish(
        **std::max_element(active.begin(), active.end(),
                           [](const Slot* a, const Slot* b) { return a->cached() < b->cached(); }),
        end);
}

void Scheduler::finish(Slot& slot, const End& end) noexcept {
    const std::shared_ptr<SequenceState> sequence = slot.sequence;
    slots_.release(slot);
    if (sequence != nullptr) sequence->finish(end);
}

}  // namespace pass
