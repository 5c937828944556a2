#include "text/text_stream.h"

#include <algorithm>
#include <utility>

#include "utf8.h"

namespace pass {

Automaton::Automaton(const std::vector<std::string>& words) {
    for (const std::string& word : words) {
        std::uint32_t state = 0;
        for (const char byte : word) {
            const auto [place, added] =
                next_.try_emplace(edge(state, byte), static_cast<std::uint32_t>(nodes_.size()));
            if (added) nodes_.push_back({nodes_[state].depth + 1});
            state = place->second;
        }
        nodes_[state].word_size = word.size();
    }
    // States of shorter suffixes are linked first, because those of longer suffixes need them.
    std::vector<std::pair<std::uint64_t, std::uint32_t>> edges(next_.begin(), next_.end());
    std::sort(edges.begin(), edges.end(), [&](const auto& a, const auto& b) {
        return nodes_[a.second].depth < nodes_[b.second].depth;
    });
    for (const auto& [edge, state] : edges) {
        const auto before = static_cast<std::uint32_t>(edge >> 8);
        Node& node = nodes_[state];
        if (before != 0)
            node.shorter = step(nodes_[before].shorter, static_cast<char>(edge & 0xFF));
        if (node.word_size == 0) node.word_size = nodes_[node.shorter].word_size;
    }
}

std::uint32_t Automaton::step(std::uint32_t state, char byte) const {
    while (true) {
        if (const auto following = next_.find(edge(state, byte)); following != next_.end())
            return following->second;
        if (state == 0) return 0;
        state = nodes_[state].shorter;
    }
}

namespace {

constexpr std::size_t max_partial_bytes = 3;  // the most bytes of an incomplete character

std::vector<std::string> without_empty(std::vector<std::string> stops) {
    std::erase_if(stops, [](const std::string& stop) { return stop.empty(); });
    return stops;
}

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

StopFilter::StopFilter(std::vector<std::string> stops)
    : automaton_(without_empty(std::move(stops))) {}

std::string StopFilter::push(std::string_view text, std::optional<std::string>& stop,
                             bool may_end) {
    const std::size_t begin = held_.size();
    held_ += text;
    for (std::size_t i = begin; i < held_.size(); ++i) {
        state_ = automaton_.step(state_, held_[i]);
        const std::size_t size = automaton_.word_size(state_);
        if (!may_end || size == 0) continue;
        const std::string up_to_here = flush();
        stop = up_to_here.substr(i + 1 - size, size);
        return up_to_here.substr(0, i + 1 - size);
    }
    std::string final_text = held_.substr(0, held_.size() - automaton_.depth(state_));
    held_.erase(0, final_text.size());
    return final_text;
}

std::string StopFilter::flush() {
    state_ = 0;
    return std::exchange(held_, {});
}

}  // namespace pass
