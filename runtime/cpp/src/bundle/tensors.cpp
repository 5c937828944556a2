#include "bundle/tensors.h"

#include <algorithm>
#include <cstring>

#include "bundle/noise.h"

namespace pass {

namespace {

constexpr std::int64_t most_logprobs = 20;

Dimension size(int value) { return std::int64_t{value}; }

}  // namespace

TensorKinds tail_tensors(const Plan& plan, std::int64_t vocab_size, std::int64_t hidden_size) {
    const Plan next = plan.next();
    const bool fused = plan.is_fused();
    const Dimension batch = "batch";
    const Dimension window = fused ? Dimension("width") : size(plan.width());
    const Dimension after = fused ? Dimension("width") : size(next.width());
    const Dimension lookahead_rows = fused ? Dimension("lookahead_rows") : size(plan.lookahead_rows());
    const TensorKind slots{"int64", {batch}}, parameter{"float32", {batch}};
    TensorKinds kinds{
        {"logits", {"float32", {batch, window, vocab_size}}},
        {"input_ids", {"int64", {batch, window}}},
        {"length", slots},
        {"active", slots},
        {"temperature", parameter},
        {"top_k", slots},
        {"top_p", parameter},
        {"min_p", parameter},
        {"draft_probs", {"float32", {batch, size(plan.drafts), vocab_size}}},
        {"draft_rows", {"int64", {size(plan.drafts + 1), size(next.depth())}}},
        {"lookahead_ids", {"int64", {"lookahead_rows"}}},
        {"hidden", {"float32", {batch, lookahead_rows, hidden_size}}},
        {"emitted", {"int64", {batch, size(plan.max_emitted())}}},
        {"emitted_rows", {"int64", {batch, size(plan.max_emitted())}}},
        {"count", slots},
        {"next_ids", {"int64", {batch, after}}},
        {"next_length", slots},
        {"next_draft_probs", {"float32", {batch, size(next.drafts), vocab_size}}},
    };
    for (const std::string& stream : noise_streams) kinds[stream] = {"int64", {batch, "positions", size(2)}};
    return kinds;
}

TensorKinds logprobs_tensors(std::int64_t vocab_size) {
    const std::vector<Dimension> most{"batch", "max_emitted", std::min(most_logprobs, vocab_size)};
    return {
        {"logits", {"float32", {"batch", "width", vocab_size}}},
        {"emitted", {"int64", {"batch", "max_emitted"}}},
        {"chosen_logprob", {"float32", {"batch", "max_emitted"}}},
        {"top_ids", {"int64", most}},
        {"top_logprobs", {"float32", most}},
    };
}

TensorKinds processors_tensors(std::int64_t vocab_size) {
    const TensorKind logits{"float32", {"batch", "width", vocab_size}};
    const TensorKind by_row{"float32", {"batch", "processed_rows", "touched"}};
    return {
        {"logits", logits},
        {"allowed", {"int32", {"batch", "processed_rows", (vocab_size + 7) / 8}}},
        {"touched", {"int64", {"batch", "touched"}}},
        {"bias", {"float32", {"batch", "touched"}}},
        {"factor", by_row},
        {"penalty", by_row},
        {"processed_logits", logits},
    };
}

std::optional<std::string> fed_by(const std::string& output) {
    if (output == "next_ids") return "input_ids";
    if (output.starts_with(present_prefix)) return cache_prefix + output.substr(std::strlen(present_prefix));
    if (output.starts_with("next_")) return output.substr(std::strlen("next_"));
    return std::nullopt;
}

std::vector<HeadArray> head_arrays(const ModelInfo& model, const HeadInfo& head) {
    constexpr std::int64_t most = std::int64_t{1} << 56;  // more than any file has, and far from overflow
    std::vector<HeadArray> arrays{{"head_table", {model.vocab_size, head.rank}, 2},
                                  {"head_hidden", {model.hidden_size, head.width}},
                                  {"head_token", {head.rank, head.width}},
                                  {"head_state", {head.width, head.width}},
                                  {"head_bias", {head.width}},
                                  {"head_out", {head.width, head.rank}}};
    std::int64_t end = 0;
    for (HeadArray& array : arrays) {
        array.offset = (end + 63) / 64 * 64;
        array.bytes = array.item;
        for (const std::int64_t size : array.shape) {
            if (__builtin_mul_overflow(array.bytes, size, &array.bytes) || array.bytes > most) array.bytes = most;
        }
        end = array.offset + array.bytes;
    }
    return arrays;
}

std::string text_of(const std::vector<Dimension>& shape) {
    std::string text;
    for (const Dimension& size : shape) {
        const auto* name = std::get_if<std::string>(&size);
        text += (&size == shape.data() ? "" : ",") +
                (name != nullptr ? *name : std::to_string(std::get<std::int64_t>(size)));
    }
    return "[" + text + "]";
}

}  // namespace pass
