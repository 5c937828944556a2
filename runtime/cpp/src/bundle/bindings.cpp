#include "bundle/bindings.h"

#include <cstring>
#include <numeric>

#include "errors.h"

namespace pass {

namespace {

template <class Value>
std::shared_ptr<const Bytes> bytes_of(const std::vector<Value>& values) {
    auto bytes = std::make_shared<Bytes>(values.size() * sizeof(Value));
    if (!values.empty()) std::memcpy(bytes->data(), values.data(), bytes->size());
    return bytes;
}

}  // namespace

std::optional<std::string> fed_input(const std::string& output) {
    if (output == "next_ids") return "input_ids";
    if (output.starts_with(present_prefix))
        return cache_prefix + output.substr(std::strlen(present_prefix));
    if (output.starts_with("next_")) return output.substr(std::strlen("next_"));
    return std::nullopt;
}

const char* name_of(Sampler sampler) {
    switch (sampler) {
        case Sampler::greedy: return "greedy";
        case Sampler::sample: return "sample";
        default: return "truncated";
    }
}

std::set<std::string> BundleBindings::transient() const {
    std::set<std::string> result;
    const auto add = [&](const Graph& graph) {
        for (const Tensor& output : graph.outputs) {
            if (!fed_input(output.name)) result.insert(output.name);
        }
    };
    add(manifest_.trunk);
    add(manifest_.logprobs);
    add(manifest_.processors);
    for (const auto& [window, tails] : manifest_.windows) {
        for (const auto& [sampler, tail] : tails) add(tail);
    }
    return result;
}

BundleBindings::Constants BundleBindings::constants(const Window& window) const {
    const WindowConstants values = constants_of(window, manifest_.model.vocab_size);
    return {
        {"row_position", bytes_of(values.row_position)},
        {"window_mask", bytes_of(values.window_mask)},
        {"logit_rows", bytes_of(values.logit_rows)},
        {"lookahead_rows", bytes_of(values.lookahead_rows)},
        {"draft_rows", bytes_of(values.draft_rows)},
        {"lookahead_ids", bytes_of(values.lookahead_ids)},
    };
}

Bindings BundleBindings::trunk(const Window& window, int batch, bool prefill) const {
    Constants fixed = constants(window);
    const int width = padded_width(window), num_logits = prefill ? 1 : window.width();
    if (width > window.width()) {  // only windows of one row are padded: this is a chain
        fixed = constants(prefill_window(width));
        std::vector<std::int64_t> logit_rows(static_cast<std::size_t>(num_logits));
        std::iota(logit_rows.begin(), logit_rows.end(), 0);
        fixed["logit_rows"] = bytes_of(logit_rows);
    }
    if (prefill) fixed.erase("logit_rows");
    const Sizes sizes{{"batch", batch},
                      {"width", width},
                      {"logit_rows", num_logits},
                      {"lookahead_rows", width > window.width() ? 0 : window.lookahead_rows()}};
    return bind_graph(manifest_.trunk, sizes, window, fixed, prefill ? prefill_scope : "");
}

const Graph& BundleBindings::tail_graph(const Window& window, Sampler sampler) const {
    if (const auto tails = manifest_.windows.find(window.tail());
        tails != manifest_.windows.end()) {
        const auto tail = tails->second.find(name_of(sampler));
        if (tail != tails->second.end()) return tail->second;
    }
    throw Error("the bundle has no tail " + window.tail() + "." + name_of(sampler));
}

Bindings BundleBindings::tail(const Window& window, Sampler sampler, int batch,
                              bool processed) const {
    const Sizes sizes{{"batch", batch},
                      {"positions", positions_},
                      {"width", window.width()},
                      {"lookahead_rows", window.lookahead_rows()}};
    Bindings result = bind_graph(tail_graph(window, sampler), sizes, window, constants(window));
    for (Binding& input : result.inputs) {
        if (processed && input.tensor == "logits") input.buffer = "processed_logits";
    }
    return result;
}

Bindings BundleBindings::processors(const Window& window, int batch,
                                    std::size_t touched_count) const {
    const Sizes sizes{{"batch", batch},
                      {"width", window.width()},
                      {"processed_rows", window.drafts + 1},
                      {"touched", static_cast<std::int64_t>(touched_count)}};
    return bind_graph(manifest_.processors, sizes, window, {});
}

Tensor BundleBindings::padded(const Tensor& tensor, const Window& window) const {
    const bool of_next_window = tensor.name == "next_ids";
    if (!of_next_window && tensor.name != "input_ids") return tensor;
    const Window shown = of_next_window ? window.next() : window;
    if (tensor.shape.at(1) != Dimension(std::int64_t{shown.width()})) return tensor;
    Tensor result = tensor;
    result.shape[1] = std::int64_t{padded_width(shown)};
    return result;
}

Bindings BundleBindings::logprobs(const Window& window, int batch) const {
    const Sizes sizes{
        {"batch", batch}, {"width", window.width()}, {"max_emitted", window.max_emitted()}};
    return bind_graph(manifest_.logprobs, sizes, window, {});
}

Bindings BundleBindings::bind_graph(const Graph& graph, const Sizes& sizes, const Window& window,
                                    const Constants& constants, const std::string& scope) const {
    Bindings result;
    for (const Tensor& tensor : graph.inputs) {
        if (tensor.name.starts_with(cache_prefix)) continue;
        result.inputs.push_back(bind(padded(tensor, window), sizes, window, constants, scope));
    }
    for (const Tensor& tensor : graph.outputs) {
        if (tensor.name.starts_with(present_prefix)) continue;
        result.outputs.push_back(bind(padded(tensor, window), sizes, window, {}, scope));
    }
    return result;
}

Binding BundleBindings::bind(const Tensor& tensor, const Sizes& sizes, const Window& window,
                             const Constants& constants, const std::string& scope) const {
    Binding result{tensor.name, "", {}, tensor.dtype, false, nullptr};
    for (const Dimension& size : tensor.shape) {
        const auto* name = std::get_if<std::string>(&size);
        if (name != nullptr && sizes.find(*name) == sizes.end()) {
            throw Error(tensor.name + " has a dimension " + *name +
                        " that this version does not know; export again");
        }
        result.shape.push_back(name != nullptr ? sizes.at(*name) : std::get<std::int64_t>(size));
    }
    if (const auto constant = constants.find(tensor.name); constant != constants.end()) {
        result.buffer = scope + window.name + "." + tensor.name;
        result.constant = constant->second;
        return result;
    }
    result.buffer = scope + fed_input(tensor.name).value_or(tensor.name);
    result.by_slot =
        scope.empty() && !tensor.shape.empty() && tensor.shape.front() == Dimension("batch");
    return result;
}

}  // namespace pass
