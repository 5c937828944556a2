#include "decode/copies.h"

#include <algorithm>
#include <array>

namespace pass {

namespace {

constexpr std::int64_t max_match_tokens = 32;
constexpr std::size_t max_matches = 8;
// From so many tokens on, a match is one degree surer.
constexpr std::array<std::int64_t, 4> longer_matches{3, 4, 8, 16};
constexpr int unanimous_confidence = 3, max_confidence = 5;

struct Vote {
    std::int64_t token = 0, weight = 0;
    std::size_t matches = 0;
};

}  // namespace

std::size_t CopyIndex::Hash::operator()(const std::pair<std::int64_t, std::int64_t>& pair) const {
    std::uint64_t hash = static_cast<std::uint64_t>(pair.first) * 0x9E3779B97F4A7C15u;
    hash = (hash ^ static_cast<std::uint64_t>(pair.second)) * 0xBF58476D1CE4E5B9u;  // splitmix64
    return hash ^ (hash >> 29);
}

void CopyIndex::extend(std::span<const std::int64_t> tokens) {
    for (const std::int64_t token : tokens) {
        if (source_ > 0) source_ = tokens_[source_] == token ? source_ + 1 : 0;
        const std::pair pair(tokens_.empty() ? -1 : tokens_.back(), token);
        tokens_.push_back(token);
        std::size_t& newest = newest_[pair];
        previous_.push_back(newest);
        newest = tokens_.size();
    }
}

CopiedDrafts CopyIndex::propose(int count) {
    const auto found = matches();
    if (found.empty() || count < 1) return {};
    std::vector<Vote> votes;
    std::int64_t total = 0;
    for (const auto& [end, length] : found) {
        const std::int64_t token = tokens_[end];
        auto vote = std::find_if(votes.begin(), votes.end(),
                                 [&](const Vote& each) { return each.token == token; });
        if (vote == votes.end()) vote = votes.insert(votes.end(), {token, 0, 0});
        vote->weight += length * length;
        vote->matches += 1;
        total += length * length;
    }
    const Vote& chosen =
        *std::max_element(votes.begin(), votes.end(),
                          [](const Vote& a, const Vote& b) { return a.weight < b.weight; });
    std::pair<std::int64_t, std::size_t> longest;
    for (const auto& [end, length] : found) {
        if (tokens_[end] == chosen.token) longest = std::max(longest, {length, end});
    }
    source_ = longest.second;
    CopiedDrafts drafts;
    const auto longer =
        std::upper_bound(longer_matches.begin(), longer_matches.end(), longest.first);
    drafts.confidence = 1 + static_cast<int>(longer - longer_matches.begin());
    if (5 * chosen.weight < 3 * total) {
        drafts.confidence = 0;
    } else if (votes.size() == 1 && chosen.matches > 1) {
        drafts.confidence = std::clamp(drafts.confidence + 1, unanimous_confidence, max_confidence);
    }
    const std::size_t period = tokens_.size() - source_;
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i)
        drafts.tokens.push_back(tokens_[source_ + i % period]);
    return drafts;
}

std::vector<std::pair<std::size_t, std::int64_t>> CopyIndex::matches() const {
    std::vector<std::pair<std::size_t, std::int64_t>> found;
    bool has_source = source_ == 0;
    for (std::size_t end = previous_.empty() ? 0 : previous_.back();
         end > 0 && found.size() < max_matches; end = previous_[end - 1]) {
        found.emplace_back(end, match_length(end));
        has_source = has_source || end == source_;
    }
    if (!has_source) found.emplace_back(source_, match_length(source_));
    return found;
}

std::int64_t CopyIndex::match_length(std::size_t end) const {
    const auto limit = std::min<std::int64_t>(static_cast<std::int64_t>(end), max_match_tokens);
    std::int64_t length = 0;
    while (length < limit && tokens_[end - 1 - static_cast<std::size_t>(length)] ==
                                 tokens_[tokens_.size() - 1 - static_cast<std::size_t>(length)])
        ++length;
    return length;
}

}  // namespace pass
