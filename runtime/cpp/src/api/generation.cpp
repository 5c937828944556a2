#include "api/generation.h"

namespace pass {

Generation::Generation(std::unique_ptr<Data> data) : data_(std::move(data)) {}
Generation::Generation(Generation&&) noexcept = default;

Generation& Generation::operator=(Generation&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
}

Generation::~Generation() {
    if (data_ != nullptr) cancel();
}

std::optional<Event> Generation::next() {
    if (data_->end) return std::nullopt;
    Sequence& sequence = *data_->sequence;
    data_->core->wait(sequence);
    std::unique_lock lock(sequence.signals->mutex);
    if (!sequence.output.events.empty()) {
        Event event = std::move(sequence.output.events.front());
        sequence.output.events.pop_front();
        lock.unlock();
        data_->tokens.insert(data_->tokens.end(), event.tokens.begin(), event.tokens.end());
        data_->text += event.text;
        return event;
    }
    data_->end = sequence.output.end;
    lock.unlock();
    if (data_->end->error != nullptr) std::rethrow_exception(data_->end->error);
    return std::nullopt;
}

void Generation::run() {
    while (next()) {
    }
}

void Generation::cancel() { data_->sequence->cancelled = true; }

const std::vector<Token>& Generation::tokens() const { return data_->tokens; }

std::vector<std::int64_t> Generation::token_ids() const {
    std::vector<std::int64_t> ids;
    for (const Token& token : data_->tokens) ids.push_back(token.id);
    return ids;
}

const std::string& Generation::text() const { return data_->text; }

std::optional<FinishReason> Generation::finish_reason() const {
    return data_->end ? std::optional(data_->end->reason) : std::nullopt;
}

StopReason Generation::stop_reason() const { return data_->end ? data_->end->stop : StopReason{}; }

const std::vector<std::int64_t>& Generation::prompt_ids() const { return data_->sequence->request.prompt_ids; }

std::uint64_t Generation::seed() const { return data_->sequence->request.sampling.seed.value_or(0); }

bool Generation::logprobs() const { return data_->sequence->request.logprobs.has_value(); }

Stats Generation::stats() const {
    const std::lock_guard lock(data_->sequence->signals->mutex);
    return data_->sequence->output.stats;
}

}  // namespace pass
