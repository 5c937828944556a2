#include "sequence.h"

#include <algorithm>
#include <chrono>

namespace pass {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

Sequence::Sequence(Work asked, std::unique_ptr<TextReader> reader, std::shared_ptr<Signals> shared)
    : work(std::move(asked)), tokens(work.prompt_ids), signals(std::move(shared)), reader_(std::move(reader)) {
    if (work.text_drafts > 0) index.emplace().extend(work.prompt_ids);
    stats.plan = work.name;
    stats.lookahead = std::max(work.lookahead, work.text_drafts);
    stats.prompt_tokens = static_cast<std::int64_t>(work.prompt_ids.size());
    mail.stats = stats;
}

void Sequence::write(std::vector<Token> pass_tokens) {
    Event event;
    std::optional<End> end;
    std::vector<std::int64_t> ids;
    for (Token& token : pass_tokens) {
        std::optional<std::string> stop;
        if (reader_ != nullptr) token.text = reader_->read(token.id, stop);
        event.text += token.text;
        ids.push_back(token.id);
        event.tokens.push_back(std::move(token));
        if (work.stop_token_ids.contains(ids.back())) {
            end = End{FinishReason::stop, ids.back(), nullptr};
        } else if (stop) {
            end = End{FinishReason::stop, *stop, nullptr};
        } else if (written() + static_cast<std::int64_t>(ids.size()) == work.max_new_tokens) {
            end = End{FinishReason::length, {}, nullptr};
        }
        if (end) break;
    }
    tokens.insert(tokens.end(), ids.begin(), ids.end());
    if (index) index->extend(ids);
    stats.generated_tokens = written();
    if (decoding_since) stats.decode_seconds = now() - *decoding_since;
    tell(std::move(event));
    if (end) finish(std::move(*end));
}

void Sequence::leave_queue() {
    if (queued_since_) stats.queue_seconds = now() - *queued_since_;
    queued_since_.reset();
}

void Sequence::finish(End end) {
    if (finished) return;
    leave_queue();
    finished = true;
    const bool by_string = std::holds_alternative<std::string>(end.stop);
    if (reader_ != nullptr && !by_string) {
        if (std::string rest = reader_->flush(); !rest.empty()) tell({{}, std::move(rest)});
    }
    const std::lock_guard lock(signals->mutex);
    mail.stats = stats;
    mail.end = std::move(end);
    signals->changed.notify_all();
}

void Sequence::tell(Event event) {
    const std::lock_guard lock(signals->mutex);
    mail.stats = stats;
    mail.events.push_back(std::move(event));
    signals->changed.notify_all();
}

}  // namespace pass
