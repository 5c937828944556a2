#include "decode/ngram.h"

#include <algorithm>

namespace pass {

void NgramIndex::extend(std::span<const std::int64_t> tokens) {
    for (std::int64_t token : tokens) {
        tokens_.push_back(token);
        index_end();
    }
}

void NgramIndex::index_end() {
    const std::size_t end = tokens_.size();
    after_match_ = 0;
    match_length_ = 0;
    for (int size = static_cast<int>(std::min<std::size_t>(end, max_gram_tokens));
         size >= min_gram_tokens; --size) {
        Gram gram;
        gram.fill(-1);
        std::copy(tokens_.end() - size, tokens_.end(), gram.begin());
        const auto [entry, is_new] = following_.try_emplace(gram, end);
        if (!is_new && after_match_ == 0) {
            after_match_ = entry->second;
            match_length_ = size;
        }
        entry->second = end;
    }
}

std::vector<std::int64_t> NgramIndex::propose(int count) const {
    std::vector<std::int64_t> proposed;
    if (after_match_ == 0) return proposed;
    const std::size_t period = tokens_.size() - after_match_;
    for (int i = 0; i < count; ++i)
        proposed.push_back(tokens_[after_match_ + static_cast<std::size_t>(i) % period]);
    return proposed;
}

}  // namespace pass
