#include "text/text_stream.h"

#include <utility>

#include "utf8.h"

namespace pass {

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

}  // namespace pass
