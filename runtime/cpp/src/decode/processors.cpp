#include "decode/processors.h"

#include <algorithm>
#include <stdexcept>

namespace pass {

namespace {

// Token lists are padded to one of these lengths: few, because each needs its own CUDA graphs.
constexpr std::size_t token_list_sizes[] = {16, 128, 1024, 8192, 65536, 524288};

std::size_t words_of(std::int64_t vocab_size) {
    return static_cast<std::size_t>(vocab_size + 31) / 32;
}
std::size_t bytes_of_bits(std::int64_t vocab_size) {
    return static_cast<std::size_t>(vocab_size + 7) / 8;
}

void set_bit(std::vector<std::uint32_t>& bits, std::int64_t token) {
    bits[static_cast<std::size_t>(token) / 32] |= std::uint32_t{1} << (token % 32);
}

void clear_bit(std::vector<std::uint32_t>& bits, std::int64_t token) {
    bits[static_cast<std::size_t>(token) / 32] &= ~(std::uint32_t{1} << (token % 32));
}

std::vector<std::uint32_t> every_token(std::int64_t vocab_size) {
    std::vector<std::uint32_t> bits(words_of(vocab_size), 0xFFFFFFFF);
    if (vocab_size % 32 != 0) bits.back() = (std::uint32_t{1} << (vocab_size % 32)) - 1;
    return bits;
}

// Remove the tokens from `allowed` that are not in `listed`, if that leaves a token.
void keep_listed(std::vector<std::uint32_t>& allowed, const std::vector<std::uint32_t>& listed) {
    std::vector<std::uint32_t> both(allowed.size());
    for (std::size_t i = 0; i < allowed.size(); ++i) both[i] = allowed[i] & listed[i];
    if (std::any_of(both.begin(), both.end(), [](std::uint32_t word) { return word != 0; }))
        allowed = both;
}

// Whether `text` ends with all tokens of `word` but the last.
bool ends_before_last(std::span<const std::int64_t> text, const std::vector<std::int64_t>& word) {
    const std::size_t before = word.size() - 1;
    return text.size() >= before && std::equal(word.begin(), word.end() - 1,
                                               text.end() - static_cast<std::ptrdiff_t>(before));
}

}  // namespace

bool Processing::changes_logits() const {
    return sampling.changes_logits() || allowed_tokens || min_tokens > 0 || !bad_words.empty() ||
           !allowed_token_ids.empty();
}

Processors::Processors(Processing processing, const std::vector<std::int64_t>& prompt)
    : processing_(std::move(processing)), prompt_length_(prompt.size()), num_read_(prompt.size()) {
    for (const auto& [token, bias] : processing_.sampling.logit_bias) changed_.insert(token);
    if (processing_.sampling.repetition_penalty == 1) return;
    seen_.insert(prompt.begin(), prompt.end());
    changed_.insert(prompt.begin(), prompt.end());
}

bool Processors::penalizes() const {
    const SamplingParams& sampling = processing_.sampling;
    return sampling.presence_penalty != 0 || sampling.frequency_penalty != 0 ||
           sampling.repetition_penalty != 1;
}

void Processors::read(const std::vector<std::int64_t>& tokens) {
    for (; num_read_ < tokens.size(); ++num_read_) {
        const std::int64_t token = tokens[num_read_];
        token_counts_[token] += 1;
        if (penalizes()) changed_.insert(token);
        if (processing_.sampling.repetition_penalty != 1) seen_.insert(token);
    }
}

std::size_t Processors::list_size(const std::vector<std::int64_t>& tokens, int drafts) {
    read(tokens);
    const std::size_t count = changed_.size() + static_cast<std::size_t>(drafts);
    const auto size = std::find_if(std::begin(token_list_sizes), std::end(token_list_sizes),
                                   [&](std::size_t length) { return length >= count; });
    if (size == std::end(token_list_sizes))
        throw std::logic_error("too many tokens have changed logits");
    return *size;
}

ProcessedRows Processors::rows(const std::vector<std::int64_t>& tokens,
                               std::span<const std::int64_t> drafts, std::size_t size) {
    read(tokens);
    // The first id V ends the drafts. The rows after them stay unchanged: no token is drawn there.
    const auto end = std::find(drafts.begin(), drafts.end(), processing_.vocab_size);
    const std::span<const std::int64_t> real_drafts =
        drafts.first(static_cast<std::size_t>(end - drafts.begin()));
    ProcessedRows result =
        no_processing(processing_.vocab_size, static_cast<int>(drafts.size()) + 1, size);
    std::vector<std::int64_t> text(tokens.begin() + static_cast<std::ptrdiff_t>(prompt_length_),
                                   tokens.end());
    const std::size_t bytes = bytes_of_bits(processing_.vocab_size);
    for (std::size_t row = 0; row <= real_drafts.size(); ++row) {
        if (row > 0) text.push_back(real_drafts[row - 1]);
        const Bits bits = allowed(text);
        for (std::size_t i = 0; i < bytes; ++i) {
            result.allowed[row * bytes + i] =
                static_cast<std::int32_t>(bits[i / 4] >> (8 * (i % 4)) & 0xFF);
        }
    }
    fill_changes(result, real_drafts, drafts.size() + 1, size);
    return result;
}

Processors::Bits Processors::allowed(std::span<const std::int64_t> text) const {
    const Bits every = every_token(processing_.vocab_size);
    Bits result = every;
    if (processing_.allowed_tokens) {
        Bits by_function = every;
        processing_.allowed_tokens(text, by_function);
        keep_listed(result, by_function);
    }
    if (!processing_.allowed_token_ids.empty()) {
        Bits listed(every.size(), 0);
        for (std::int64_t token : processing_.allowed_token_ids) set_bit(listed, token);
        keep_listed(result, listed);
    }
    Bits not_forbidden = every;
    for (const std::vector<std::int64_t>& word : processing_.bad_words) {
        if (ends_before_last(text, word)) clear_bit(not_forbidden, word.back());
    }
    if (static_cast<std::int64_t>(text.size()) < processing_.min_tokens) {
        for (std::int64_t token : processing_.end_tokens) clear_bit(not_forbidden, token);
    }
    keep_listed(result, not_forbidden);
    return result;
}

void Processors::fill_changes(ProcessedRows& result, std::span<const std::int64_t> drafts,
                              std::size_t num_rows, std::size_t size) const {
    const SamplingParams& sampling = processing_.sampling;
    std::set<std::int64_t> changed = changed_;
    if (penalizes()) changed.insert(drafts.begin(), drafts.end());
    const std::vector<std::int64_t> ids(changed.begin(), changed.end());
    if (ids.empty()) return;
    const auto repetition = static_cast<float>(sampling.repetition_penalty);
    const auto frequency = static_cast<float>(sampling.frequency_penalty);
    const auto presence = static_cast<float>(sampling.presence_penalty);
    for (std::size_t i = 0; i < size; ++i) {
        // The lists are padded with copies of their first entry: entries may be repeated if equal.
        const std::int64_t token = ids[i < ids.size() ? i : 0];
        const auto bias = sampling.logit_bias.find(token);
        result.touched[i] = token;
        result.bias[i] =
            bias == sampling.logit_bias.end() ? 0.0F : static_cast<float>(bias->second);
        if (!penalizes()) continue;
        const auto in_text = token_counts_.find(token);
        auto count = static_cast<float>(in_text == token_counts_.end() ? 0 : in_text->second);
        for (std::size_t row = 0; row < num_rows; ++row) {
            if (row > 0 && row <= drafts.size() && drafts[row - 1] == token) count += 1;
            const std::size_t entry = row * size + i;
            if (count > 0 || seen_.contains(token)) result.factor[entry] = repetition;
            result.penalty[entry] = frequency * count + (count > 0 ? presence : 0.0F);
        }
    }
}

ProcessedRows no_processing(std::int64_t vocab_size, int rows, std::size_t size) {
    const auto count = static_cast<std::size_t>(rows);
    ProcessedRows result;
    result.allowed.assign(count * bytes_of_bits(vocab_size), 0xFF);
    result.touched.assign(size, 0);
    result.bias.assign(size, 0.0F);
    result.factor.assign(count * size, 1.0F);
    result.penalty.assign(count * size, 0.0F);
    return result;
}

}  // namespace pass
