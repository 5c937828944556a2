#include "text/text_stream.h"

#include <algorithm>
#include <utility>

#include "utf8.h"

namespace pass {

namespace {

constexpr std::size_t max_partial_bytes = 3;  // the most bytes of an incomplete character

}  // namespace

TextStream::TextStream(const std::shared_ptr<const Vocabulary>& vocabulary,
                       const std::vector<std::string>& stop,
                       const std::vector<std::int64_t>& prompt, std::int64_t min_tokens)
    : filter_(stop), detokenizer_(vocabulary, prompt), tokens_before_stop_(min_tokens) {
    for (const std::string& text : stop) {
        if (const std::int64_t token = vocabulary->special(text); token >= 0)
            special_stops_[token] = text;
    }
}

std::string TextStream::read(std::int64_t token, std::optional<std::string>& stop) {
    const bool may_end = tokens_before_stop_ == 0;
    if (!may_end) --tokens_before_stop_;
    if (const auto special = special_stops_.find(token);
        may_end && special != special_stops_.end()) {
        stop = special->second;
        return filter_.flush();
    }
    return filter_.push(detokenizer_.push(token), stop, may_end);
}

std::string TextStream::flush() { return filter_.flush(); }

Detokenizer::Detokenizer(std::shared_ptr<const Vocabulary> vocabulary,
                         const std::vector<std::int64_t>& prompt)
    : vocabulary_(std::move(vocabulary)),
      strips_left_(vocabulary_->stripped_spaces()),
      shown_before_(read_prompt(prompt)) {}

std::string Detokenizer::push(std::int64_t token) {
    std::string text = decode(bytes(token));
    if (!text.empty()) {
        // The prompt's text already shows that the character was not completed.
        if (!shown_before_.empty() && text.starts_with(shown_before_))
            text.erase(0, shown_before_.size());
        shown_before_.clear();
    }
    return text;
}

std::string Detokenizer::bytes(std::int64_t token) {
    std::string result = vocabulary_->bytes(token);
    while (strips_left_ > 0 && result.starts_with(' ')) {
        result.erase(0, 1);
        --strips_left_;
    }
    if (!result.empty()) strips_left_ = 0;
    return result;
}

std::string Detokenizer::decode(std::string_view bytes) {
    held_ += bytes;
    const std::size_t end = whole_characters(held_);
    std::string text =
        lossy_utf8(std::string_view(held_).substr(0, end), vocabulary_->byte_fallback());
    held_.erase(0, end);
    return text;
}

std::string Detokenizer::read_prompt(const std::vector<std::int64_t>& prompt) {
    for (auto token = prompt.begin(); token != prompt.end() && strips_left_ > 0; ++token)
        bytes(*token);  // reduces `strips_left_`
    std::string end;
    for (auto token = prompt.rbegin(); token != prompt.rend() && end.size() < max_partial_bytes;
         ++token)
        end.insert(0, vocabulary_->bytes(*token));
    decode(end);  // leaves the incomplete character in `held_`
    return lossy_utf8(held_, vocabulary_->byte_fallback());
}

StopFilter::StopFilter(std::vector<std::string> stops) : stops_(std::move(stops)) {
    std::erase_if(stops_, [](const std::string& stop) { return stop.empty(); });
    std::sort(stops_.begin(), stops_.end(),
              [](const auto& a, const auto& b) { return a.size() > b.size(); });
}

std::string StopFilter::push(std::string_view text, std::optional<std::string>& stop,
                             bool may_end) {
    const std::size_t before = held_.size();
    held_ += text;
    for (std::size_t end = before + 1; may_end && end <= held_.size(); ++end) {
        const std::string_view so_far = std::string_view(held_).substr(0, end);
        const auto found = std::find_if(stops_.begin(), stops_.end(),
                                        [&](const auto& each) { return so_far.ends_with(each); });
        if (found == stops_.end()) continue;
        stop = *found;
        return flush().substr(0, end - found->size());
    }
    std::size_t kept = 0;  // bytes that begin a stop string
    for (const std::string& each : stops_) {
        for (std::size_t size = std::min(each.size(), held_.size()); size > kept; --size) {
            if (held_.ends_with(std::string_view(each).substr(0, size))) kept = size;
        }
    }
    std::string final_text = held_.substr(0, held_.size() - kept);
    held_.erase(0, final_text.size());
    return final_text;
}

std::string StopFilter::flush() { return std::exchange(held_, {}); }

}  // namespace pass
