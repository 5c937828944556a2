#include "decode/sequence.h"

#include <algorithm>
#include <new>

#include "backends/memory.h"

namespace pass {

End error_end() noexcept {
    std::exception_ptr error = std::current_exception();
    try {
        throw;
    } catch (const std::bad_alloc&) {
        try {
            error = std::make_exception_ptr(out_of_memory());
        } catch (...) {  // no memory for a message either
        }
    } catch (...) {  // other exceptions stay as they are
    }
    return {FinishReason::error, {}, error};
}

SequenceState::SequenceState(ResolvedRequest resolved, std::unique_ptr<TextReader> reader,
                             std::shared_ptr<Signals> shared)
    : request(std::move(resolved)),
      tokens(request.prompt_ids),
      signals(std::move(shared)),
      reader_(std::move(reader)) {
    if (request.ngram_drafts > 0) copies.emplace().extend(request.prompt_ids);
    if (request.processing) processors.emplace(*request.processing, request.prompt_ids);
    stats.plan = request.plan_name;
    stats.lookahead = std::max(request.lookahead_drafts, request.ngram_drafts);
    stats.prompt_tokens = static_cast<std::int64_t>(request.prompt_ids.size());
    output.stats = stats;
}

void SequenceState::write(std::vector<Token> pass_tokens) {
    Event event;
    std::optional<End> end;
    std::vector<std::int64_t> ids;
    for (Token& token : pass_tokens) {
        std::optional<std::string> stop;
        if (reader_ != nullptr) token.text = reader_->read(token.id, stop);
        event.text += token.text;
        ids.push_back(token.id);
        event.tokens.push_back(std::move(token));
        if (request.stop_token_ids.contains(ids.back())) {
            end = End{FinishReason::stop, ids.back(), nullptr};
        } else if (stop) {
            end = End{FinishReason::stop, *stop, nullptr};
        } else if (written() + static_cast<std::int64_t>(ids.size()) == request.max_new_tokens) {
            end = End{FinishReason::length, {}, nullptr};
        }
        if (end) break;
    }
    tokens.insert(tokens.end(), ids.begin(), ids.end());
    if (copies) copies->extend(ids);
    stats.generated_tokens = written();
    if (decoding_since) stats.decode_seconds = now() - *decoding_since;
    publish(std::move(event));
    if (end) finish(std::move(*end));
}

void SequenceState::leave_queue() {
    if (queued_since_) stats.queue_seconds = now() - *queued_since_;
    queued_since_.reset();
}

void SequenceState::finish(End end) noexcept {
    if (finished) return;
    leave_queue();
    finished = true;
    const bool at_stop_string = std::holds_alternative<std::string>(end.stop);
    if (reader_ != nullptr && !at_stop_string) {
        try {
            if (std::string rest = reader_->flush(); !rest.empty()) publish({{}, std::move(rest)});
        } catch (...) {  // waiting threads must still learn that the sequence has ended
            end = error_end();
        }
    }
    const std::lock_guard lock(signals->mutex);
    output.stats = stats;
    output.end = std::move(end);
    signals->unfinished -= 1;
    signals->changed.notify_all();
}

void SequenceState::publish(Event event) {
    const std::lock_guard lock(signals->mutex);
    output.stats = stats;
    output.events.push_back(std::move(event));
    signals->changed.notify_all();
}

}  // namespace pass
