// Checks that a manifest does not contradict itself: its numbers against the tensors and plans that it lists, as
// pass_runtime.bundle.consistency does. What follows from names (a plan's layout, a tensor's feed) is derived, and not
// compared with what the manifest lists.

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "bundle/manifest.h"
#include "bundle/plan.h"
#include "bundle/tensors.h"
#include "errors.h"

namespace pass {

namespace {

constexpr std::int64_t head_blocks = 64;  // of the draft heads in this version's tails

using std::to_string;

void check_model(const Manifest& manifest) {
    const ModelInfo& model = manifest.model;
    if (model.heads % model.kv_heads != 0) {
        throw Error("model.heads " + to_string(model.heads) + " is no multiple of model.kv_heads " +
                    to_string(model.kv_heads));
    }
    Numbers tokens = model.eos_token_ids;
    if (model.bos_token_id) tokens.insert(tokens.begin(), *model.bos_token_id);
    for (const std::int64_t token : tokens) {
        if (token >= 0 && token < model.vocab_size) continue;
        throw Error("token " + to_string(token) + " is not in the vocabulary of " + to_string(model.vocab_size) +
                    " (model.vocab_size)");
    }
    const LookaheadInfo& lookahead = manifest.lookahead;
    const auto length = static_cast<std::size_t>(lookahead.length);
    if (lookahead.acceptance_per_position.size() > length) {
        throw Error("lookahead.acceptance_per_position is longer than lookahead.length");
    }
    if (lookahead.acceptance_per_position_sampled.size() > length) {
        throw Error("lookahead.acceptance_per_position_sampled is longer than lookahead.length");
    }
}

// The tensors whose names begin with `prefix` must be its keys and values of every layer, by their names in any order.
void check_cache(const ModelInfo& model, const std::string& prefix, const std::vector<Tensor>& tensors) {
    const std::vector<Dimension> shape{"batch", model.kv_heads, "capacity", model.head_dim};
    std::map<std::string, const Tensor*> found;
    for (const Tensor& tensor : tensors) {
        if (tensor.name.starts_with(prefix)) found[tensor.name] = &tensor;
    }
    bool all = found.size() == 2 * static_cast<std::uint64_t>(model.layers);
    for (std::int64_t i = 0; all && i < model.layers; ++i) {
        all = found.contains(prefix + "key." + to_string(i)) && found.contains(prefix + "value." + to_string(i));
    }
    if (!all) {
        throw Error("model.layers is " + to_string(model.layers) + " and the trunk has " + to_string(found.size()) +
                    " " + prefix.substr(0, prefix.size() - 1) + " tensors");
    }
    for (const auto& [name, tensor] : found) {
        if (tensor->shape != shape) {
            throw Error(name + " is " + text_of(tensor->shape) + ", not " + text_of(shape) +
                        " (model.kv_heads, model.head_dim)");
        }
        if (tensor->dtype != model.dtype)
            throw Error(name + " is " + tensor->dtype + " and model.dtype " + model.dtype);
    }
}

void check_trunk(const Manifest& manifest) {
    const ModelInfo& model = manifest.model;
    check_cache(model, cache_prefix, manifest.trunk.inputs);
    check_cache(model, present_prefix, manifest.trunk.outputs);
    const Tensor* logits = manifest.trunk.find("logits");
    if (logits == nullptr || logits->shape.empty() || logits->shape.back() != Dimension(model.vocab_size)) {
        throw Error("the trunk's logits are not those of model.vocab_size " + to_string(model.vocab_size));
    }
    if ((manifest.trunk.find("lookahead_rows") != nullptr) != manifest.lookahead.reads_rows()) {
        throw Error("lookahead.adapter_rank is " + to_string(manifest.lookahead.adapter_rank) +
                    " and the trunk says otherwise");
    }
}

void check_head(const Manifest& manifest) {
    const ModelInfo& model = manifest.model;
    const Tensor* hidden = manifest.trunk.find("hidden");
    const auto& head = manifest.lookahead.head;
    if ((hidden != nullptr) != head.has_value()) throw Error("lookahead.head says otherwise than the trunk");
    if (hidden == nullptr) return;
    const std::vector<Dimension> shape{"batch", "lookahead_rows", model.hidden_size};
    if (hidden->dtype != "float32" || hidden->shape != shape) {
        throw Error("hidden is " + hidden->dtype + " " + text_of(hidden->shape) + ", not float32 " + text_of(shape));
    }
    const FileInfo* stored = manifest.file(head_file);
    const HeadArray last = head_arrays(model, *head).back();
    if (stored == nullptr || stored->bytes != last.offset + last.bytes) {
        throw Error(std::string(head_file) + " is not of lookahead.head.rank " + to_string(head->rank) +
                    " and lookahead.head.width " + to_string(head->width));
    }
    if (head->blocks != head_blocks) {
        throw Error("lookahead.head.blocks is " + to_string(head->blocks) + ", and this version's tails have " +
                    to_string(head_blocks));
    }
}

void check_tensors(const Graph& graph, const TensorKinds& expected) {
    for (const auto* tensors : {&graph.inputs, &graph.outputs}) {
        for (const Tensor& tensor : *tensors) {
            const auto found = expected.find(tensor.name);
            if (found == expected.end() || found->second.dtype != tensor.dtype || found->second.shape != tensor.shape) {
                throw Error(tensor.name + " of " + graph.file + " cannot be " + tensor.dtype + " " +
                            text_of(tensor.shape));
            }
        }
    }
}

void check_plans(const Manifest& manifest) {
    const bool trees = std::any_of(manifest.plans.begin(), manifest.plans.end(),
                                   [](const PlanInfo& info) { return !info.parents.empty(); });
    if (trees && (!manifest.lookahead.head || manifest.rule != "match")) {
        throw Error("there are trees of drafts, which need lookahead.head and the rule match");
    }
    const std::vector<Plan> plans = bundle_plans(static_cast<int>(manifest.lookahead.length), trees);
    const auto same = [](const PlanInfo& info, const Plan& plan) { return info.name == plan.name; };
    if (!std::equal(manifest.plans.begin(), manifest.plans.end(), plans.begin(), plans.end(), same)) {
        throw Error("the plans are not those of lookahead.length " + to_string(manifest.lookahead.length));
    }
    for (std::size_t i = 0; i < plans.size(); ++i) {
        const TensorKinds expected = tail_tensors(plans[i], manifest.model.vocab_size, manifest.model.hidden_size);
        if (manifest.plans[i].parents != Numbers(plans[i].parents.begin(), plans[i].parents.end())) {
            throw Error("the tree of " + plans[i].name + " is not the one that this version knows");
        }
        for (const auto& [sampler, tail] : manifest.plans[i].tails) {
            check_tensors(tail, expected);
            const bool compares = manifest.rule == "rejection" && plans[i].drafts > 0 && sampler != "greedy";
            if ((tail.find("draft_probs") != nullptr) != compares) {
                throw Error("rule is " + manifest.rule + " and " + tail.file + " is of another");
            }
            const bool by_head = manifest.lookahead.head.has_value() && plans[i].next().drafts > 0;
            if ((tail.find("hidden") != nullptr) != by_head) {
                throw Error("lookahead.head says otherwise than " + tail.file);
            }
        }
    }
}

}  // namespace

void check_consistency(const Manifest& manifest) {
    check_model(manifest);
    check_trunk(manifest);
    check_head(manifest);
    check_plans(manifest);
    check_tensors(manifest.logprobs, logprobs_tensors(manifest.model.vocab_size));
    if (manifest.processors) check_tensors(*manifest.processors, processors_tensors(manifest.model.vocab_size));
}

void check_trunk_metadata(const Manifest& manifest, const std::string& stated) {
    using Json = nlohmann::json;
    const ModelInfo& model = manifest.model;
    const std::pair<const char*, Json> facts[] = {{"model.dtype", model.dtype},
                                                  {"model.weights", model.weights},
                                                  {"model.vocab_size", model.vocab_size},
                                                  {"model.hidden_size", model.hidden_size},
                                                  {"model.layers", model.layers},
                                                  {"model.heads", model.heads},
                                                  {"model.kv_heads", model.kv_heads},
                                                  {"model.head_dim", model.head_dim},
                                                  {"model.max_capacity", model.max_capacity},
                                                  {"lookahead.length", manifest.lookahead.length},
                                                  {"rule", manifest.rule}};
    const Json found = Json::parse(stated, nullptr, false);
    for (const auto& [name, expected] : facts) {
        const Json actual = found.is_object() ? found.value(name, Json()) : Json();
        if (actual == expected) continue;
        throw Error("the manifest says " + std::string(name) + " " + expected.dump() + " and " + manifest.trunk.file +
                    " " + (actual.is_null() ? "nothing" : actual.dump()) + "; export the bundle again");
    }
}

}  // namespace pass
