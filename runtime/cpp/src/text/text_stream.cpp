#include "text/text_stream.h"

#include <algorithm>
#include <utility>

#include "utf8.h"

namespace pass {

namespace {

// Bytes of the longest proper prefix of `stop` that `text` ends with.
std::size_t overlap(std::string_view text, std::string_view stop) {
    for (std::size_t n = std::min(stop.size() - 1, text.size()); n > 0; --n) {
        if (text.ends_with(stop.substr(0, n))) return n;
    }
    return 0;
}

}  // namespace

TextStream::TextStream(std::shared_ptr<const Vocabulary> vocabulary, const std::vector<std::string>& stop)
    : vocabulary_(std::move(vocabulary)), filter_(stop) {
    for (const std::string& text : stop) {
        if (const std::int64_t token = vocabulary_->special(text); token >= 0) special_.insert(token);
    }
}

std::string TextStream::read(std::int64_t token, std::optional<std::string>& stop) {
    if (special_.contains(token)) {
        stop = vocabulary_->special_text(token);
        return filter_.flush();
    }
    bytes_ += vocabulary_->bytes(token);
    const std::string text = lossy_utf8(bytes_);
    if (text.empty() || text.ends_with("\xEF\xBF\xBD"))
        return filter_.push("", stop);  // the next token may complete it
    bytes_.clear();
    return filter_.push(text, stop);
}

std::string TextStream::flush() { return filter_.flush(); }

StopFilter::StopFilter(std::vector<std::string> stops) : stops_(std::move(stops)) {
    std::erase_if(stops_, [](const std::string& stop) { return stop.empty(); });
}

std::string StopFilter::push(std::string_view text, std::optional<std::string>& stop) {
    held_ += text;
    std::optional<std::pair<std::size_t, std::size_t>> first;  // (end, begin)
    for (const std::string& candidate : stops_) {
        const std::size_t at = held_.find(candidate);
        if (at == std::string::npos) continue;
        const std::pair place{at + candidate.size(), at};
        if (!first || place < *first) {
            first = place;
            stop = candidate;
        }
    }
    if (first) {
        std::string shown = held_.substr(0, first->second);
        held_.clear();
        return shown;
    }
    std::size_t held = 0;
    for (const std::string& candidate : stops_) held = std::max(held, overlap(held_, candidate));
    std::string rest = held_.substr(held_.size() - held);
    std::swap(held_, rest);
    rest.resize(rest.size() - held);
    return rest;
}

std::string StopFilter::flush() { return std::exchange(held_, {}); }

}  // namespace pass
