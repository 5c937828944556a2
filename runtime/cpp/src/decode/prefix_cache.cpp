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
    if (const Match found = match(tokens, salt); found.count == length) {
        touch(found.text);
        return;
    }
    for (std::size_t i = texts_.size(); i-- > 0;) {
        const std::vector<std::int64_t>& other = texts_[i].tokens;
        const bool begins = common_prefix(other, tokens) == static_cast<std::int64_t>(other.size());
        if (begins && texts_[i].salt == salt) drop(i);
    }
    while (used() + size > budget_ || texts_.size() >= max_saved_prefixes) drop(0);
    try {
        texts_.reserve(texts_.size() + 1);
        Text text{salt, {tokens.begin(), tokens.end()}, size, memory_.allocate(size)};
        texts_.push_back(std::move(text));
    } catch (const DeviceLost&) {
        throw;
    } catch (const std::exception&) {  // there is no memory, and no request needs this
        return;
    }
    cache_.save(slot, length, texts_.back().address);
}

PrefixStore::Match PrefixStore::match(std::span<const std::int64_t> tokens, const std::string& salt) const {
    Match found;
    for (std::size_t i = 0; i < texts_.size(); ++i) {
        const std::int64_t count = texts_[i].salt == salt ? common_prefix(texts_[i].tokens, tokens) : 0;
        if (count > found.count) found = {i, count};
    }
    return found;
}

void PrefixStore::load(const Match& found, int slot) {
    const Text& text = texts_.at(found.text);
    cache_.load(slot, found.count, text.address, static_cast<std::int64_t>(text.tokens.size()));
    touch(found.text);
}

std::size_t PrefixStore::used() const {
    std::size_t sum = 0;
    for (const Text& text : texts_) sum += text.size;
    return sum;
}

void PrefixStore::touch(std::size_t text) {
    const auto used = texts_.begin() + static_cast<std::ptrdiff_t>(text);
    std::rotate(used, used + 1, texts_.end());
}

void PrefixStore::drop(std::size_t text) {
    memory_.free(texts_[text].address);
    texts_.erase(texts_.begin() + static_cast<std::ptrdiff_t>(text));
}

}  // namespace pass
