#include "bundle/tensors.h"

#include <cstring>

namespace pass {

const std::map<std::string, TensorKind>& tensor_kinds() {
    static const std::map<std::string, TensorKind> kinds{
        {"input_ids", {"int64", 2}},
        {"row_position", {"int64", 1}},
        {"window_mask", {"bool", 2}},
        {"length", {"int64", 1}},
        {"logit_rows", {"int64", 1}},
        {"lookahead_rows", {"int64", 1}},
        {"logits", {"float32", 3}},
        {"hidden", {"float32", 3}},
        {"active", {"int64", 1}},
        {"temperature", {"float32", 1}},
        {"top_k", {"int64", 1}},
        {"top_p", {"float32", 1}},
        {"min_p", {"float32", 1}},
        {"draft_probs", {"float32", 3}},
        {"noise_offsets", {"int64", 3}},
        {"accept_offsets", {"int64", 3}},
        {"draft_offsets", {"int64", 3}},
        {"draft_rows", {"int64", 2}},
        {"lookahead_ids", {"int64", 1}},
        {"emitted", {"int64", 2}},
        {"emitted_rows", {"int64", 2}},
        {"count", {"int64", 1}},
        {"next_ids", {"int64", 2}},
        {"next_length", {"int64", 1}},
        {"top_ids", {"int64", 3}},
        {"top_logprobs", {"float32", 3}},
        {"next_draft_probs", {"float32", 3}},
        {"allowed", {"int32", 3}},
        {"touched", {"int64", 2}},
        {"chosen_logprob", {"float32", 2}},
        {"bias", {"float32", 2}},
        {"factor", {"float32", 3}},
        {"processed_logits", {"float32", 3}},
        {"penalty", {"float32", 3}},
    };
    return kinds;
}

std::optional<std::string> fed_input(const std::string& output) {
    if (output == "next_ids") return "input_ids";
    if (output.starts_with(present_prefix))
        return cache_prefix + output.substr(std::strlen(present_prefix));
    if (output.starts_with("next_")) return output.substr(std::strlen("next_"));
    return std::nullopt;
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
