#include "backends/backend.h"

#include <algorithm>
#include <stdexcept>

#include "bundle/noise.h"
#include "errors.h"

namespace pass {

namespace {

// A sampling parameter as tails take it.
float in_graph(double value) { return static_cast<float>(value); }
std::int64_t in_graph(std::int64_t value) { return value; }

}  // namespace

Backend::Backend(const Manifest& manifest, Capabilities capabilities,
                 std::unique_ptr<Memory> memory, OpenFiles files)
    : manifest_(manifest),
      capabilities_(std::move(capabilities)),
      memory_(std::move(memory)),
      files_(std::move(files)),
      bindings_(manifest, capabilities_.noise_positions(), capabilities_.least_width),
      buffers_(*memory_, capabilities_.slots(), bindings_.transient()),
      cache_(*memory_, manifest, capabilities_.slots()),
      noise_(buffers_, manifest.rule == "rejection" ? noise_streams.size() : 1,
             capabilities_.slots(), capabilities_.noise_positions()),
      lengths_(static_cast<std::size_t>(capabilities_.slots())) {}

void Backend::resize(std::int64_t capacity, std::span<const std::int64_t> lengths) {
    cache_.resize(capacity, lengths);
}

void Backend::set_sampling(int slot, const SamplingParams& params) {
    const bool draws = params.sampler() != Sampler::greedy;
    noise_.begin(slot, draws ? std::optional(params.seed.value_or(0)) : std::nullopt);
#define WRITE(type, name, ...) buffers_.write_number(#name, slot, in_graph(params.name));
    PASS_TAIL_FIELDS(WRITE)
#undef WRITE
}

void Backend::mask(int slot, std::int64_t length) { set_slot(slot, length, false); }

void Backend::stage(int slot, const Window& window, std::int64_t length, std::int64_t root,
                    std::span<const std::int64_t> drafts) {
    if (drafts.size() > static_cast<std::size_t>(window.drafts))
        throw std::invalid_argument("too many drafts for " + window.name);
    const std::int64_t vocab = capabilities_.vocab_size;
    std::vector<std::int64_t> ids{root};
    ids.insert(ids.end(), drafts.begin(), drafts.end());
    ids.resize(static_cast<std::size_t>(1 + window.drafts), vocab);
    for (int size : window.groups) {
        for (int i = 0; i < size; ++i) ids.push_back(vocab + i);  // look-ahead embedding i
    }
    ids.resize(static_cast<std::size_t>(bindings_.padded_width(window)), 0);
    buffers_.write_row("input_ids", slot, {bindings_.padded_width(window)}, ids);
    set_slot(slot, length, true);
    if (window.drafts > 0 && manifest_.rule == "rejection") {
        // A draft has probability 1 and all other tokens 0; without a draft, all tokens have 0.
        std::vector<float> draft_probs(static_cast<std::size_t>(window.drafts * vocab), 0.0F);
        for (std::size_t i = 0; i < drafts.size(); ++i) {
            draft_probs[i * static_cast<std::size_t>(vocab) + static_cast<std::size_t>(drafts[i])] =
                1.0F;
        }
        buffers_.write_row("draft_probs", slot, {window.drafts, vocab}, draft_probs);
    }
}

std::vector<std::vector<std::int64_t>> Backend::drafts(const Window& window, int batch) {
    std::vector<std::vector<std::int64_t>> result(static_cast<std::size_t>(batch));
    if (window.drafts == 0) return result;
    const std::int64_t width = bindings_.padded_width(window);
    const std::vector<std::int64_t> windows =
        buffers_.read<std::int64_t>("input_ids", batch, {width});
    for (std::size_t slot = 0; slot < result.size(); ++slot) {
        const auto root = windows.begin() + static_cast<std::ptrdiff_t>(slot) * width;
        result[slot].assign(root + 1, root + 1 + window.drafts);
    }
    return result;
}

void Backend::set_processors(int slot, const ProcessedRows& rows) {
    const auto touched_count = static_cast<std::int64_t>(rows.touched.size());
    const std::int64_t processed_rows =
        static_cast<std::int64_t>(rows.factor.size()) / touched_count;
    const std::int64_t mask_size = static_cast<std::int64_t>(rows.allowed.size()) / processed_rows;
    buffers_.write_row("allowed", slot, {processed_rows, mask_size}, rows.allowed);
    buffers_.write_row("touched", slot, {touched_count}, rows.touched);
    buffers_.write_row("bias", slot, {touched_count}, rows.bias);
    buffers_.write_row("factor", slot, {processed_rows, touched_count}, rows.factor);
    buffers_.write_row("penalty", slot, {processed_rows, touched_count}, rows.penalty);
}

void Backend::set_slot(int slot, std::int64_t length, bool active) {
    buffers_.write_number("length", slot, length);
    buffers_.write_number("active", slot, std::int64_t{active});
    lengths_[static_cast<std::size_t>(slot)] = active ? std::optional(length) : std::nullopt;
}

void Backend::prefill(int slot, std::int64_t length, std::span<const std::int64_t> tokens,
                      int width) {
    const Window window = prefill_window(width);
    const std::string scope = prefill_scope;
    const int padded_width = bindings_.padded_width(window);
    std::vector<std::int64_t> ids(tokens.begin(), tokens.end());
    ids.resize(static_cast<std::size_t>(padded_width), 0);
    buffers_.write(scope + "input_ids", {1, padded_width}, ids);
    buffers_.write(scope + "length", {1}, {length});
    buffers_.write(scope + "logit_rows", {1}, {static_cast<std::int64_t>(tokens.size()) - 1});
    run_prefill(slot, window);
}

std::vector<std::vector<std::int64_t>> Backend::run(const PassKind& kind) {
    for (int slot = 0; slot < kind.batch; ++slot) {
        const std::optional<std::int64_t> length = lengths_[static_cast<std::size_t>(slot)];
        // Up to the last position that a window of this width can reach.
        if (length) noise_.cover(slot, *length, *length + listed_positions(kind.window.width()));
    }
    const PassResult result = run_pass(kind);
    std::vector<std::vector<std::int64_t>> emitted;
    for (std::size_t slot = 0; slot < result.count.size(); ++slot) {
        const auto first =
            result.emitted.begin() + static_cast<std::ptrdiff_t>(slot) * kind.window.max_emitted();
        emitted.emplace_back(first, first + result.count[slot]);
        if (lengths_[slot]) *lengths_[slot] += result.count[slot];
    }
    return emitted;
}

Backend::PassResult Backend::run_pass(const PassKind& kind) {
    run_trunk(kind.window, kind.batch);
    run_tail(kind);
    return {buffers_.read<std::int64_t>("count", kind.batch, {}),
            buffers_.read<std::int64_t>("emitted", kind.batch, {kind.window.max_emitted()})};
}

Logprobs Backend::logprobs(const PassKind& kind) {
    const std::int64_t emitted = kind.window.max_emitted(),
                       top = std::min<std::int64_t>(PASS_MAX_LOGPROBS, capabilities_.vocab_size);
    return {static_cast<std::size_t>(emitted), static_cast<std::size_t>(top),
            buffers_.read<float>("chosen_logprob", kind.batch, {emitted}),
            buffers_.read<std::int64_t>("top_ids", kind.batch, {emitted, top}),
            buffers_.read<float>("top_logprobs", kind.batch, {emitted, top})};
}

}  // namespace pass
