#include "runner.h"

#include <algorithm>

namespace pass {

namespace {

std::size_t common_prefix(const std::vector<std::int64_t>& a, const std::vector<std::int64_t>& b, std::size_t most) {
    const std::size_t end = std::min({a.size(), b.size(), most});
    std::size_t i = 0;
    while (i < end && a[i] == b[i]) ++i;
    return i;
}

// The device is to be told anew where the windows of `slot` begin, or it would write behind the old length.
void keep(Slot& slot, std::size_t tokens) {
    slot.kept.resize(std::min(tokens, slot.kept.size()));
    slot.entered = slot.parked = false;
}

TokenLogprobs told(const Logprobs& logprobs, std::size_t slot, std::size_t place, int count) {
    const std::size_t row = slot * logprobs.emitted + place;
    TokenLogprobs found{logprobs.chosen[row], {}};
    for (std::size_t i = 0; i < std::min(static_cast<std::size_t>(count), logprobs.most); ++i) {
        const std::size_t at = row * logprobs.most + i;
        found.top.emplace_back(logprobs.ids[at], logprobs.values[at]);
    }
    return found;
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
    return static_cast<std::int64_t>(prompt) - 1 + sizes.columns(1) <= sizes.max_capacity();
}

bool Runner::admit(const std::shared_ptr<Sequence>& sequence) {
    const std::vector<std::int64_t>& prompt = sequence->work.prompt_ids;
    const bool reuse = sequence->work.reuse_prefix;
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
    backend_.set_sampling(chosen->number, sequence->work.sampling);
    chosen->sequence = sequence;
    chosen->kept.clear();
    chosen->left = 0;
    chosen->entered = chosen->parked = false;
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
    const std::vector<std::int64_t>& prompt = sequence.work.prompt_ids;
    const auto [count, width] = chunk(sequence.cached, static_cast<std::int64_t>(prompt.size()) - 1, most);
    reserve(sequence.cached + backend_.capabilities().columns(width));
    const double begun = now();
    backend_.prefill(
        slot.number, sequence.cached,
        std::span(prompt).subspan(static_cast<std::size_t>(sequence.cached), static_cast<std::size_t>(count)), width);
    const double done = now();
    engine_seconds_ += done - begun;
    sequence.cached += count;
    slot.parked = false;  // behind what is cached now
    sequence.stats.prefill_seconds += done - started;
    return count;
}

void Runner::make_room(const Plan& plan, int batch) {
    std::int64_t longest = 0;
    for (int i = 0; i < batch; ++i) {
        const Slot& slot = slots_[static_cast<std::size_t>(i)];
        if (slot.sequence != nullptr) longest = std::max(longest, slot.cached());
    }
    const std::int64_t columns = backend_.capabilities().columns(plan.width());
    reserve(longest + columns);
    for (int i = 0; i < batch; ++i) {
        Slot& slot = slots_[static_cast<std::size_t>(i)];
        const std::int64_t most = backend_.capacity() - columns;
        if (slot.sequence == nullptr && slot.cached() > most) keep(slot, static_cast<std::size_t>(most));
    }
}

std::pair<std::vector<Outcome>, double> Runner::run(const Plan& plan, const std::map<int, Drafts>& drafts) {
    const std::vector<Slot*> active = decoding();
    PassKind kind{plan, batch(active), sampler(active), false};
    for (const Slot* slot : active) kind.logprobs = kind.logprobs || slot->sequence->work.logprobs;
    // By the rejection rule drafts are without the probabilities that another sampler's tail compares.
    if (kind.sampler != sampler_ && backend_.manifest().rule == "rejection") window_.reset();
    sampler_ = kind.sampler;
    lay_out(kind, drafts);
    window_.reset();  // until the pass is done
    const double started = now();
    for (Slot* slot : active) {
        if (slot->sequence->decoding_since) continue;
        slot->sequence->decoding_since = started;
        slot->sequence->engine_before = engine_seconds_;
    }
    const std::vector<std::vector<std::int64_t>> emitted = backend_.run(kind);
    const double seconds = now() - started;
    engine_seconds_ += seconds;
    std::optional<Logprobs> logprobs;
    if (kind.logprobs) logprobs = backend_.logprobs(kind);
    std::vector<Outcome> outcomes;
    for (Slot* slot : active) {
        outcomes.push_back(
            take(*slot, plan, emitted[static_cast<std::size_t>(slot->number)], logprobs ? &*logprobs : nullptr));
    }
    window_ = plan.next();
    return {std::move(outcomes), seconds};
}

PassSeconds Runner::idle_pass(const PassKind& kind) {
    make_room(kind.plan, kind.batch);
    window_.reset();
    for (int i = 0; i < kind.batch; ++i) {
        Slot& slot = slots_[static_cast<std::size_t>(i)];
        backend_.enter(slot.number, kind.plan, slot.cached(), 0);
        park(slot);
    }
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
    for (const Slot* slot : active) found = std::max(found, slot->sequence->work.sampling.sampler());
    return found;
}

// Write the windows that are not on the device as they should be.
void Runner::lay_out(const PassKind& kind, const std::map<int, Drafts>& drafts) {
    for (int i = 0; i < kind.batch; ++i) {
        Slot& slot = slots_[static_cast<std::size_t>(i)];
        if (slot.sequence == nullptr || !slot.sequence->prefilled()) {
            if (!slot.parked) park(slot);
            continue;
        }
        const auto given = drafts.find(slot.number);
        if (window_ == kind.plan && slot.entered && given == drafts.end()) continue;
        const Drafts& from_text = given != drafts.end() ? given->second : Drafts{};
        slot.entered = false;
        backend_.enter(slot.number, kind.plan, slot.sequence->cached, slot.sequence->tokens.back(), from_text);
        slot.left = static_cast<int>(from_text.size());
        slot.source = Source::ngram;
        slot.entered = true;
        slot.parked = false;
    }
}

void Runner::park(Slot& slot) {
    slot.entered = slot.parked = false;
    backend_.park(slot.number, slot.cached());
    slot.parked = true;
}

// The host's account of one slot after a pass.
Outcome Runner::take(Slot& slot, const Plan& plan, const std::vector<std::int64_t>& ids, const Logprobs* logprobs) {
    Sequence& sequence = *slot.sequence;
    const int accepted = static_cast<int>(ids.size()) - 1;
    Outcome outcome{slot.sequence, slot.left, slot.source, {}};
    for (std::size_t i = 0; i < ids.size(); ++i) {
        Token token{ids[i], static_cast<int>(i) < accepted ? slot.source : Source::model, std::nullopt, ""};
        if (logprobs != nullptr && sequence.work.logprobs) {
            token.logprobs = told(*logprobs, static_cast<std::size_t>(slot.number), i, *sequence.work.logprobs);
        }
        outcome.tokens.push_back(std::move(token));
    }
    sequence.cached += static_cast<std::int64_t>(ids.size());
    sequence.stats.engine_seconds = engine_seconds_ - sequence.engine_before;
    slot.left = plan.left(accepted);
    slot.source = Source::lookahead;
    return outcome;
}

// Grow the cache to `columns` at least.
void Runner::reserve(std::int64_t columns) {
    if (columns > backend_.capacity()) resize(backend_.capabilities().capacity(columns));
}

// Before a sequence of `columns` joins in `slot`: a cache that is too long for all of them shrinks, since passes pay
// for its length. What slots kept for later goes where it does not fit.
void Runner::fit(std::int64_t columns, Slot& slot, std::size_t kept) {
    keep(slot, kept);
    for (const Slot* other : busy()) {
        columns = std::max(columns, static_cast<std::int64_t>(other->sequence->tokens.size()) + 1);
    }
    const Capabilities& sizes = backend_.capabilities();
    const std::int64_t fitting = sizes.capacity(std::min(columns, sizes.max_capacity()));
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
    backend_.set_sampling(target.number, source.sequence->work.sampling);
    target.sequence = std::move(source.sequence);
    source.sequence = nullptr;
    keep(source, 0);
}

// Prompt tokens of the next chunk and the rows of its window: the narrowest that holds the rest, where it is three
// quarters full or no other is filled, else the widest that is.
std::pair<std::int64_t, int> Runner::chunk(std::int64_t start, std::int64_t stop,
                                           std::optional<std::int64_t> most) const {
    const std::int64_t left = backend_.capabilities().max_capacity() - start, remaining = stop - start;
    std::vector<int> offered, widths;
    for (int width : backend_.capabilities().prefill_widths) {
        if (backend_.capabilities().columns(width) > left) continue;
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
