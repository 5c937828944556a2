#include "decode/processors.h"

#include <algorithm>
#include <stdexcept>

namespace pass {

namespace {

// The lengths to which the lists of tokens are padded. They are few, because each has CUDA graphs.
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

std::vector<std::uint32_t> every_token(std::int64_t vocab_size) {
    std::vector<std::uint32_t> bits(words_of(vocab_size), 0xFFFFFFFF);
    if (vocab_size % 32 != 0) bits.back() = (std::uint32_t{1} << (vocab_size % 32)) - 1;
    return bits;
}

// Forbid the tokens that are not in `listed`, if that leaves a token.
void keep_listed(std::vector<std::uint32_t>& allowed, const std::vector<std::uint32_t>& listed) {
    std::vector<std::uint32_t> fewer(allowed.size());
    for (std::size_t i = 0; i < allowed.size(); ++i) fewer[i] = allowed[i] & listed[i];
    if (std::any_of(fewer.begin(), fewer.end(), [](std::uint32_t word) { return word != 0; }))
        allowed = fewer;
}

// Whether `text` ends with all of `word` but its last token.
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
    for (const auto& [token, bias] : processing_.sampling.logit_bias) add_biased(token);
    if (processing_.sampling.repetition_penalty == 1) return;
    seen_.insert(prompt.begin(), prompt.end());
    for (std::int64_t token : seen_) add_biased(token);
}

void Processors::add_biased(std::int64_t token) {
    if (biased_.insert(token).second) biased_ids_.push_back(token);
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
        if (penalizes()) add_biased(token);
        if (processing_.sampling.repetition_penalty != 1) seen_.insert(token);
    }
}

std::size_t Processors::list_size(const std::vector<std::int64_t>& tokens, int drafts) {
    read(tokens);
    const std::size_t count = biased_ids_.size() + static_cast<std::size_t>(drafts);
    const auto found = std::find_if(std::begin(token_list_sizes), std::end(token_list_sizes),
                                    [&](std::size_t length) { return length >= count; });
    if (found == std::end(token_list_sizes))
        throw std::logic_error("too many tokens have changed logits");
    return *found;
}

ProcessedRows Processors::rows(const std::vector<std::int64_t>& tokens,
                               std::span<const std::int64_t> drafts, std::size_t size) {
    read(tokens);
    const auto end = std::find(drafts.begin(), drafts.end(), processing_.vocab_size);
    const std::span<const std::int64_t> known =
        drafts.first(static_cast<std::size_t>(end - drafts.begin()));
    ProcessedRows result =
        no_processing(processing_.vocab_size, static_cast<int>(drafts.size()) + 1, size);
    std::vector<std::int64_t> text(tokens.begin() + static_cast<std::ptrdiff_t>(prompt_length_),
                                   tokens.end());
    const std::size_t bytes = bytes_of_bits(processing_.vocab_size);
    for (std::size_t row = 0; row <= known.size(); ++row) {
        if (row > 0) text.push_back(known[row - 1]);
        const Bits bits = allowed(text);
        for (std::size_t i = 0; i < bytes; ++i) {
            result.allowed[row * bytes + i] =
                static_cast<std::int32_t>(bits[i / 4] >> (8 * (i % 4)) & 0xFF);
        }
    }
    change(result, known, drafts.size() + 1, size);
    return result;
}

Processors::Bits Processors::allowed(std::span<const std::int64_t> text) const {
    const Bits every = every_token(processing_.vocab_size);
    Bits result = every;
    if (processing_.allowed_tokens) {
        Bits own = every;
        processing_.allowed_tokens(text, own);
        keep_listed(result, own);
    }
    if (!processing_.allowed_token_ids.empty()) {
        Bits listed(every.size(), 0);
        for (std::int64_t token : processing_.allowed_token_ids) set_bit(listed, token);
        keep_listed(result, listed);
    }
    Bits forbidden(every.size(), 0);
    for (const std::vector<std::int64_t>& word : processing_.bad_words) {
        if (ends_before_last(text, word)) set_bit(forbidden, word.back());
    }
    if (static_cast<std::int64_t>(text.size()) < processing_.min_tokens) {
        for (std::int64_t token : processing_.end_tokens) set_bit(forbidden, token);
    }
    for (std::uint32_t& word : forbidden) word = ~word;
    keep_listed(result, forbidden);
    return result;
}

void Processors::change(ProcessedRows& rows, std::span<const std::int64_t> drafts,
                        std::size_t count, std::size_t size) const {
    const SamplingParams& sampling = processing_.sampling;
    std::vector<std::int64_t> ids = biased_ids_;
    for (std::int64_t draft : drafts) {
        if (penalizes() && std::find(ids.begin(), ids.end(), draft) == ids.end())
            ids.push_back(draft);
    }
    if (ids.empty()) return;
    const auto repetition = static_cast<float>(sampling.repetition_penalty);
    const auto frequency = static_cast<float>(sampling.frequency_penalty);
    const auto presence = static_cast<float>(sampling.presence_penalty);
    for (std::size_t i = 0; i < size; ++i) {
        // The lists are padded with their first token.
        const std::int64_t token = ids[i < ids.size() ? i : 0];
        const auto bias = sampling.logit_bias.find(token);
        rows.touched[i] = token;
        rows.bias[i] = bias == sampling.logit_bias.end() ? 0.0F : static_cast<float>(bias->second);
        if (!penalizes()) continue;
        const auto before = token_counts_.find(token);
        auto times = static_cast<float>(before == token_counts_.end() ? 0 : before->second);
        for (std::size_t row = 0; row < count; ++row) {
            if (row > 0 && row <= drafts.size() && drafts[row - 1] == token) times += 1;
            const std::size_t at = row * size + i;
            if (times > 0 || seen_.contains(token)) rows.factor[at] = repetition;
            rows.penalty[at] = frequency * times + (times > 0 ? presence : 0.0F);
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
