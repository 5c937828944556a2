#include "bundle/consistency.h"

#include <algorithm>
#include <map>
#include <set>

#include "bundle/tensors.h"

namespace pass {

namespace {

constexpr std::int64_t head_blocks = 64;
constexpr const char* head_file = "tail.head.data";

// Thrown by the checks below, each of which looks at one part.
struct Contradiction {
    std::string text;
};

[[noreturn]] void wrong(std::string text) { throw Contradiction{std::move(text)}; }

std::string text_of(std::int64_t number) { return std::to_string(number); }

std::string text_of(const std::vector<Dimension>& shape) {
    std::string text = "[";
    for (const Dimension& dimension : shape) {
        const auto* name = std::get_if<std::string>(&dimension);
        text += (&dimension == shape.data() ? "" : ",") +
                (name != nullptr ? *name : text_of(std::get<std::int64_t>(dimension)));
    }
    return text + "]";
}

void check_model(const Manifest& manifest) {
    const ModelInfo& model = manifest.model;
    if (model.heads % model.kv_heads != 0) {
        wrong("model.heads " + text_of(model.heads) + " is no multiple of model.kv_heads " + text_of(model.kv_heads));
    }
    Numbers tokens = model.eos_token_ids;
    if (model.bos_token_id) tokens.insert(tokens.begin(), *model.bos_token_id);
    for (const std::int64_t token : tokens) {
        if (token < 0 || token >= model.vocab_size) {
            wrong("token " + text_of(token) + " is not in the vocabulary of " + text_of(model.vocab_size) +
                  " (model.vocab_size)");
        }
    }
    const auto length = static_cast<std::size_t>(manifest.lookahead.length);
    for (const auto& [name, shares] :
         {std::pair{"acceptance_per_position", &manifest.lookahead.acceptance_per_position},
          {"acceptance_per_position_sampled", &manifest.lookahead.acceptance_per_position_sampled}}) {
        if (shares->size() > length) wrong(std::string("lookahead.") + name + " is longer than lookahead.length");
    }
}

// The tensors whose names begin with `prefix`. Of two with the same name the last counts.
std::vector<const Tensor*> beginning_with(const std::string& prefix, const std::vector<Tensor>& tensors) {
    std::vector<const Tensor*> found;
    for (const Tensor& tensor : tensors) {
        if (!tensor.name.starts_with(prefix)) continue;
        const auto same =
            std::find_if(found.begin(), found.end(), [&](auto* other) { return other->name == tensor.name; });
        if (same == found.end()) {
            found.push_back(&tensor);
        } else {
            *same = &tensor;
        }
    }
    return found;
}

// Whether `found` are <prefix>_key.0 .. <prefix>_key.n-1 and <prefix>_value.0 .. in any order.
bool is_cache(const std::string& prefix, const std::vector<const Tensor*>& found, std::int64_t layers) {
    if (static_cast<std::int64_t>(found.size()) != 2 * layers) return false;
    std::set<std::string> names;
    for (std::int64_t i = 0; i < layers; ++i) {
        names.insert(prefix + "_key." + text_of(i));
        names.insert(prefix + "_value." + text_of(i));
    }
    return std::all_of(found.begin(), found.end(), [&](auto* tensor) { return names.contains(tensor->name); });
}

void check_cache(const ModelInfo& model, const std::string& prefix, const std::vector<Tensor>& tensors) {
    const std::vector<Dimension> shape{"batch", model.kv_heads, "capacity", model.head_dim};
    const auto found = beginning_with(prefix + "_", tensors);
    if (!is_cache(prefix, found, model.layers)) {
        wrong("model.layers is " + text_of(model.layers) + " and the trunk has " +
              text_of(static_cast<std::int64_t>(found.size())) + " " + prefix + " tensors");
    }
    for (const Tensor* tensor : found) {
        if (tensor->shape != shape) {
            wrong(tensor->name + " is " + text_of(tensor->shape) + ", not " + text_of(shape) +
                  " (model.kv_heads, model.head_dim)");
        }
        if (tensor->dtype != model.dtype) {
            wrong(tensor->name + " is " + tensor->dtype + " and model.dtype " + model.dtype);
        }
    }
}

void check_trunk(const Manifest& manifest) {
    const ModelInfo& model = manifest.model;
    check_cache(model, "past", manifest.trunk.inputs);
    check_cache(model, "present", manifest.trunk.outputs);
    const Tensor* logits = manifest.trunk.find("logits");
    if (logits == nullptr || logits->shape.empty() || logits->shape.back() != Dimension(model.vocab_size)) {
        wrong("the trunk's logits are not those of model.vocab_size " + text_of(model.vocab_size));
    }
    if ((manifest.trunk.find("lookahead_rows") != nullptr) != manifest.lookahead.reads_rows()) {
        wrong("lookahead.adapter_rank is " + text_of(manifest.lookahead.adapter_rank) +
              " and the trunk says otherwise");
    }
}

// The bytes of the draft head's arrays, each of which begins at a multiple of 64; none where the number overflows.
std::optional<std::int64_t> head_size(std::int64_t vocab, std::int64_t hidden, std::int64_t rank, std::int64_t width) {
    struct Array {
        std::int64_t rows, columns, item;
    };
    std::int64_t end = 0;
    for (const auto& [rows, columns, item] : {Array{vocab, rank, 2},
                                              {hidden, width, 4},
                                              {rank, width, 4},
                                              {width, width, 4},
                                              {1, width, 4},
                                              {width, rank, 4}}) {
        std::int64_t bytes = 0;
        if (__builtin_mul_overflow(rows, columns, &bytes) || __builtin_mul_overflow(bytes, item, &bytes) ||
            __builtin_add_overflow((end + 63) / 64 * 64, bytes, &end) || end > std::int64_t{1} << 60) {
            return std::nullopt;
        }
    }
    return end;
}

void check_head(const Manifest& manifest) {
    const ModelInfo& model = manifest.model;
    const Tensor* hidden = manifest.trunk.find("hidden");
    const auto& head = manifest.lookahead.head;
    if ((hidden != nullptr) != head.has_value()) wrong("lookahead.head says otherwise than the trunk");
    if (hidden == nullptr) return;
    const std::vector<Dimension> shape{"batch", "lookahead_rows", model.hidden_size};
    if (hidden->dtype != "float32" || hidden->shape != shape) {
        wrong("hidden is " + hidden->dtype + " " + text_of(hidden->shape) + ", not float32 " + text_of(shape));
    }
    const FileInfo* stored = manifest.file(head_file);
    const auto size = head_size(model.vocab_size, model.hidden_size, head->rank, head->width);
    if (stored == nullptr || !size || stored->bytes != *size) {
        wrong(std::string(head_file) + " is not of lookahead.head.rank " + text_of(head->rank) +
              " and lookahead.head.width " + text_of(head->width));
    }
    if (head->blocks != head_blocks) {
        wrong("lookahead.head.blocks is " + text_of(head->blocks) + ", and this version's tails have " +
              text_of(head_blocks));
    }
}

void check_tensors(const Graph& graph, const TensorKinds& expected) {
    for (const auto* tensors : {&graph.inputs, &graph.outputs}) {
        for (const Tensor& tensor : *tensors) {
            const auto found = expected.find(tensor.name);
            if (found == expected.end() || found->second.dtype != tensor.dtype || found->second.shape != tensor.shape) {
                wrong(tensor.name + " of " + graph.file + " cannot be " + tensor.dtype + " " + text_of(tensor.shape));
            }
        }
    }
}

ListedConstants listed(const Plan& plan, std::int64_t vocab_size) {
    const PlanConstants constants = constants_of(plan, vocab_size);
    const auto width = static_cast<std::size_t>(plan.width());
    ListedConstants found{constants.row_position,   {}, constants.logit_rows,
                          constants.lookahead_rows, {}, constants.lookahead_ids};
    for (std::size_t row = 0; row < width; ++row) {
        std::string& text = found.window_mask.emplace_back();
        for (std::size_t column = 0; column < width; ++column) {
            text += constants.window_mask[row * width + column] != 0 ? '1' : '0';
        }
    }
    if (plan.is_fused()) {
        const auto drafts = static_cast<std::ptrdiff_t>(plan.next().drafts);
        for (auto row = constants.draft_rows.begin(); row != constants.draft_rows.end(); row += drafts) {
            found.draft_rows.emplace_back(row, row + drafts);
        }
    }
    return found;
}

void check_layout(const PlanInfo& info, const Plan& plan, std::int64_t vocab_size) {
    const ListedConstants expected = listed(plan, vocab_size);
    const auto same = [&](bool equal, const char* name) {
        if (!equal) wrong(std::string(name) + " of plan " + info.name + " is not what such a plan has");
    };
    same(info.drafts == plan.drafts, "drafts");
    same(info.groups == Numbers(plan.groups.begin(), plan.groups.end()), "groups");
    same(info.next == plan.next().name, "next");
    same(info.listed.row_position == expected.row_position, "constants.row_position");
    same(info.listed.window_mask == expected.window_mask, "constants.window_mask");
    same(info.listed.logit_rows == expected.logit_rows, "constants.logit_rows");
    same(info.listed.lookahead_rows == expected.lookahead_rows, "constants.lookahead_rows");
    same(info.listed.draft_rows == expected.draft_rows, "constants.draft_rows");
    same(info.listed.lookahead_ids == expected.lookahead_ids, "constants.lookahead_ids");
}

void check_plan(const Manifest& manifest, const PlanInfo& info, const Plan& plan) {
    check_layout(info, plan, manifest.model.vocab_size);
    const TensorKinds expected = tail_tensors(plan, manifest.model.vocab_size, manifest.model.hidden_size);
    for (const auto& [sampler, tail] : info.tails) {
        check_tensors(tail, expected);
        const bool compares = manifest.rule == "rejection" && plan.drafts > 0 && sampler != "greedy";
        if ((tail.find("draft_probs") != nullptr) != compares) {
            wrong("rule is " + manifest.rule + " and " + tail.file + " is of another");
        }
        const bool by_head = manifest.lookahead.head.has_value() && plan.next().drafts > 0;
        if ((tail.find("hidden") != nullptr) != by_head) wrong("lookahead.head says otherwise than " + tail.file);
    }
}

void check_plans(const Manifest& manifest) {
    const std::vector<Plan> plans = bundle_plans(static_cast<int>(manifest.lookahead.length));
    const auto same = [](const PlanInfo& info, const Plan& plan) { return info.name == plan.name; };
    if (!std::equal(manifest.plans.begin(), manifest.plans.end(), plans.begin(), plans.end(), same)) {
        wrong("the plans are not those of lookahead.length " + text_of(manifest.lookahead.length));
    }
    for (std::size_t i = 0; i < plans.size(); ++i) check_plan(manifest, manifest.plans[i], plans[i]);
}

// The input of the next graph or pass that shares the memory of `output`.
std::optional<std::string> fed_by(const std::string& output) {
    if (output == "next_ids") return "input_ids";
    for (const auto& [prefix, fed] : {std::pair<std::string, std::string>{"present_", "past_"}, {"next_", ""}}) {
        if (output.starts_with(prefix)) return fed + output.substr(prefix.size());
    }
    return std::nullopt;
}

void check_feeds(const Manifest& manifest) {
    std::map<std::string, std::pair<std::optional<std::string>, std::optional<std::string>>>
        feeds;  // (found, expected)
    const auto expect = [&](const Graph& graph) {
        for (const Tensor& tensor : graph.outputs) {
            if (auto fed = fed_by(tensor.name)) feeds[tensor.name].second = fed;
        }
    };
    expect(manifest.trunk);
    for (const PlanInfo& plan : manifest.plans) {
        for (const auto& [sampler, tail] : plan.tails) expect(tail);
    }
    for (const auto& [output, input] : manifest.feeds) feeds[output].first = input;
    for (const auto& [output, pair] : feeds) {
        const auto& [found, expected] = pair;
        if (found != expected) {
            wrong("feeds has " + output + " -> " + found.value_or("None") + ", not " + expected.value_or("None"));
        }
    }
}

}  // namespace

std::vector<Plan> bundle_plans(int lookahead) {
    std::vector<Plan> plans{ar_plan()};
    for (int length = 1; length <= lookahead; ++length) {
        for (const char* mode : {"two-pass", "fused"}) {
            for (const Plan& plan : make_cycle(mode, length).plans) plans.push_back(plan);
        }
    }
    return plans;
}

std::optional<std::string> inconsistency(const Manifest& manifest) {
    try {
        check_model(manifest);
        check_trunk(manifest);
        check_head(manifest);
        check_plans(manifest);
        check_tensors(manifest.logprobs, logprobs_tensors(manifest.model.vocab_size));
        check_feeds(manifest);
    } catch (const Contradiction& contradiction) {
        return contradiction.text;
    }
    return std::nullopt;
}

}  // namespace pass
