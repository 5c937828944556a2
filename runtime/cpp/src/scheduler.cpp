#include "scheduler.h"

#include <algorithm>
#include <new>

#include "errors.h"
#include "memory.h"

namespace pass {

namespace {

constexpr std::int64_t prompt_tokens = 64;  // that a round reads at most while others are decoding

// The exception under way, as what a reader gets.
End failed() {
    try {
        throw;
    } catch (const std::bad_alloc&) {
        return {FinishReason::error, {}, std::make_exception_ptr(out_of_memory())};
    } catch (...) {
        return {FinishReason::error, {}, std::current_exception()};
    }
}

View view_of(const Slot& slot) {
    if (!slot.sequence->index) return {slot.left, {}, 0};
    const NgramIndex& index = *slot.sequence->index;
    return {slot.left, index.propose(slot.sequence->work.text_drafts), index.matched()};
}

// What the pass says about speeds and drafts.
void observe(PlanTuner& tuner, const Plan& plan, int batch, double seconds, const std::vector<Outcome>& outcomes,
             const std::vector<View>& views) {
    tuner.observe(plan, batch, seconds);
    bool drafted = false;
    for (std::size_t i = 0; i < outcomes.size(); ++i) {
        const Outcome& outcome = outcomes[i];
        const int accepted = static_cast<int>(outcome.tokens.size()) - 1;
        if (outcome.drafted == 0) continue;
        drafted = true;
        if (outcome.source == Source::ngram) {
            tuner.text(views[i].matched).record(outcome.drafted, accepted);
            continue;
        }
        tuner.drafts().record(outcome.drafted, accepted);
        if (outcome.sequence->acceptance) outcome.sequence->acceptance->record(outcome.drafted, accepted);
    }
    if (!plan.groups.empty() || drafted) return;
    tuner.drafts().forget();
    for (const Outcome& outcome : outcomes) {
        if (outcome.sequence->acceptance) outcome.sequence->acceptance->forget();
    }
}

}  // namespace

void Scheduler::add(std::shared_ptr<Sequence> sequence) {
    const std::lock_guard lock(mutex_);
    if (waiting_.size() >= max_queue_) {
        throw QueueFull(std::to_string(waiting_.size()) + " requests are waiting already, and the queue holds " +
                        std::to_string(max_queue_) + ": try again later, or open the session with a larger max_queue");
    }
    waiting_.push_back(std::move(sequence));
}

std::size_t Scheduler::waiting() const {
    const std::lock_guard lock(mutex_);
    return waiting_.size();
}

bool Scheduler::round() {
    drop_cancelled();
    admit();
    prefill();
    try {
        if (const std::vector<Slot*> active = runner_.gather(); !active.empty()) decode(active);
    } catch (...) {  // in a pass of all of them, nobody knows whose fault it was
        const End end = failed();
        for (Slot* slot : runner_.decoding()) finish(*slot, end);
    }
    return waiting() > 0 || !runner_.busy().empty();
}

void Scheduler::end_all(const End& end) {
    for (Slot* slot : runner_.busy()) finish(*slot, end);
    while (std::shared_ptr<Sequence> sequence = first_waiting()) {
        sequence->finish(end);
        const std::lock_guard lock(mutex_);
        waiting_.pop_front();
    }
}

std::shared_ptr<Sequence> Scheduler::first_waiting() {
    const std::lock_guard lock(mutex_);
    return waiting_.empty() ? nullptr : waiting_.front();
}

void Scheduler::drop_cancelled() {
    const End end{FinishReason::cancelled, {}, nullptr};
    for (Slot* slot : runner_.busy()) {
        if (slot->sequence->cancelled) finish(*slot, end);
    }
    std::vector<std::shared_ptr<Sequence>> dropped;
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
    for (const std::shared_ptr<Sequence>& sequence : dropped) sequence->finish(end);
}

void Scheduler::admit() {
    while (const std::shared_ptr<Sequence> sequence = first_waiting()) {
        if (!runner_.fits(sequence->work.prompt_ids.size())) {
            sequence->finish({FinishReason::length, {}, nullptr});
        } else {
            try {
                if (!runner_.admit(sequence)) return;
            } catch (...) {
                sequence->finish(failed());
            }
        }
        const std::lock_guard lock(mutex_);
        waiting_.pop_front();
    }
}

// Chunks of the prompts, the oldest first; wide ones where nobody is decoding.
void Scheduler::prefill() {
    std::vector<Slot*> reading;
    for (Slot* slot : runner_.busy()) {
        if (!slot->sequence->prefilled()) reading.push_back(slot);
    }
    std::sort(reading.begin(), reading.end(), [](const Slot* a, const Slot* b) { return a->admitted < b->admitted; });
    const bool alone = runner_.decoding().empty();
    const std::optional<std::int64_t> most = alone ? std::nullopt : std::optional(prompt_tokens);
    std::int64_t read = 0;
    for (Slot* slot : reading) {
        while (slot->sequence != nullptr && !slot->sequence->prefilled()) {
            // Whoever else there is has a turn, or may be cancelled, behind every chunk.
            if (read > 0 && (alone || read >= prompt_tokens)) return;
            try {
                read += runner_.prefill(*slot, most);
            } catch (...) {
                finish(*slot, failed());
            }
        }
    }
}

void Scheduler::decode(const std::vector<Slot*>& active) {
    const int batch = runner_.batch(active);
    PlanTuner* known = tuner(active, batch);
    std::vector<View> views;
    for (const Slot* slot : active) views.push_back(view_of(*slot));
    const std::optional<Pass> chosen = choose(active, views, known, batch);
    if (!chosen) {
        end_longest(active, {FinishReason::length, {}, nullptr});
        return;
    }
    std::map<int, Drafts> drafts;
    for (std::size_t i = 0; i < active.size(); ++i) {
        if (chosen->drafts[i]) drafts[active[i]->number] = *chosen->drafts[i];
    }
    try {
        runner_.make_room(chosen->plan, batch);
    } catch (...) {
        end_longest(active, failed());
        return;
    }
    auto [outcomes, seconds] = runner_.run(chosen->plan, drafts);
    if (known != nullptr) observe(*known, chosen->plan, batch, seconds, outcomes, views);
    deliver(std::move(outcomes));
}

// The oldest request with a plan of its own decides for all: a pass runs one plan. Else it is the fastest.
std::optional<Pass> Scheduler::choose(const std::vector<Slot*>& active, const std::vector<View>& views,
                                      PlanTuner* known, int batch) {
    const Slot* oldest = nullptr;
    int most = 0;
    std::vector<const Acceptance*> accepted;
    for (const Slot* slot : active) {
        const Sequence& sequence = *slot->sequence;
        if (sequence.work.cycle && (oldest == nullptr || slot->admitted < oldest->admitted)) oldest = slot;
        most = std::max(most, sequence.work.lookahead);
        if (sequence.acceptance) accepted.push_back(&*sequence.acceptance);
    }
    // Nobody's windows are in place where all have just been admitted: a round begins, whatever was run before.
    const bool entered = std::any_of(active.begin(), active.end(), [](const Slot* slot) { return slot->entered; });
    const Plan* window = entered && runner_.window() ? &*runner_.window() : nullptr;
    if (oldest != nullptr) {
        Always judge;
        return next_pass(*oldest->sequence->work.cycle, window, runner_.room(), runner_.backend().capabilities(), views,
                         judge);
    }
    if (known == nullptr) {
        Always judge;
        return next_pass(make_cycle("ar", 0), window, runner_.room(), runner_.backend().capabilities(),
                         std::vector<View>(views.size()), judge);
    }
    const Candidate decided = known->mode(most, batch, accepted);
    Expected judge(*known, decided, batch);
    return next_pass(decided.cycle, window, runner_.room(), runner_.backend().capabilities(), views, judge);
}

// What knows the speeds of these requests, where one of them leaves the plan open. Null also where that takes timing
// passes first and one of them has no token yet: the first one comes from a plain pass, without the wait.
PlanTuner* Scheduler::tuner(const std::vector<Slot*>& active, int batch) {
    const bool open = std::any_of(active.begin(), active.end(),
                                  [](const Slot* slot) { return !slot->sequence->work.cycle.has_value(); });
    if (!open) return nullptr;
    const Sampler sampler = Runner::sampler(active);
    const bool begun =
        std::all_of(active.begin(), active.end(), [](const Slot* slot) { return slot->sequence->stats.passes > 0; });
    if (!begun && !tuners_.known(sampler, batch)) return nullptr;
    PlanTuner& known = tuners_.get(sampler, batch);
    for (const Slot* slot : active) {
        if (!slot->sequence->acceptance) slot->sequence->acceptance = known.new_acceptance();
    }
    return &known;
}

void Scheduler::deliver(std::vector<Outcome> outcomes) {
    for (Outcome& outcome : outcomes) {
        Sequence& sequence = *outcome.sequence;
        sequence.stats.record(outcome.drafted, static_cast<int>(outcome.tokens.size()));
        try {
            sequence.write(std::move(outcome.tokens));
        } catch (...) {  // its text's
            sequence.finish(failed());
        }
    }
    for (Slot* slot : runner_.busy()) {
        if (slot->sequence->finished) runner_.release(*slot);
    }
}

void Scheduler::end_longest(const std::vector<Slot*>& active, const End& end) {
    finish(**std::max_element(active.begin(), active.end(),
                              [](const Slot* a, const Slot* b) { return a->cached() < b->cached(); }),
           end);
}

void Scheduler::finish(Slot& slot, const End& end) {
    const std::shared_ptr<Sequence> sequence = slot.sequence;
    runner_.release(slot);
    if (sequence != nullptr) sequence->finish(end);
}

}  // namespace pass
