#include "decode/prefix_cache.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "errors.h"

namespace pass {

std::int64_t common_prefix(std::span<const std::int64_t> a, std::span<const std::int64_t> b) {
    return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

void PrefixStore::save(int slot, std::span<const std::int64_t> tokens, const std::string& salt) {
    const auto length = static_cast<std::int64_t>(tokens.size());
    const std::size_t size = cache_.saved_bytes(length);
    if (tokens.size() < min_saved_tokens || size > budget_) return;
    if (const Match older = match(tokens, salt); older.count == length) {
        touch(older.index);
        return;
    }
    for (std::size_t i = saved_.size(); i-- > 0;) {
        const std::vector<std::int64_t>& other = saved_[i].tokens;
        const bool covered =
            common_prefix(other, tokens) == static_cast<std::int64_t>(other.size());
        if (covered && saved_[i].salt == salt) drop(i);  // the new copy begins with these tokens
    }
    while (used() + size > budget_ || saved_.size() >= max_saved_prefixes) drop(0);
    try {
        saved_.reserve(saved_.size() + 1);
        SavedPrefix saved{salt, {tokens.begin(), tokens.end()}, size, memory_.allocate(size)};
        saved_.push_back(std::move(saved));
    } catch (const DeviceLost&) {
        throw;
    } catch (const std::exception&) {  // no memory, but no request needs the copy
        return;
    }
    cache_.save(slot, length, saved_.back().address);
}

PrefixStore::Match PrefixStore::match(std::span<const std::int64_t> tokens,
                                      const std::string& salt) const {
    Match result;
    for (std::size_t i = 0; i < saved_.size(); ++i) {
        const std::int64_t count =
            saved_[i].salt == salt ? common_prefix(saved_[i].tokens, tokens) : 0;
        if (count > result.count) result = {i, count};
    }
    return result;
}

void PrefixStore::load(const Match& match, int slot) {
    const SavedPrefix& saved = saved_.at(match.index);
    cache_.load(slot, match.count, saved.address, static_cast<std::int64_t>(saved.tokens.size()));
    touch(match.index);
}

std::size_t PrefixStore::used() const {
    std::size_t sum = 0;
    for (const SavedPrefix& saved : saved_) sum += saved.size;
    return sum;
}

void PrefixStore::touch(std::size_t index) {
    const auto copy = saved_.begin() + static_cast<std::ptrdiff_t>(index);
    std::rotate(copy, copy + 1, saved_.end());
}

void PrefixStore::drop(std::size_t index) {
    memory_.free(saved_[index].address);
    saved_.erase(saved_.begin() + static_cast<std::ptrdiff_t>(index));
}

}  // namespace pass
