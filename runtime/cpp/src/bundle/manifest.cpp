#include "bundle/manifest.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "bundle/integrity.h"
#include "bundle/tensors.h"
#include "errors.h"
#include "utf8.h"

namespace pass {

namespace {

template <class Value>
const Value* find_in(const OrderedMap<Value>& mapping, const std::string& name) {
    const auto item = std::find_if(mapping.begin(), mapping.end(),
                                   [&](auto& each) { return each.first == name; });
    return item == mapping.end() ? nullptr : &item->second;
}

using std::to_string;

// Throws Error unless the tensors whose names begin with `prefix` are the K/V of all layers.
void check_cache(const ModelInfo& model, const std::string& prefix,
                 const std::vector<Tensor>& tensors) {
    const std::vector<Dimension> shape{"batch", model.kv_heads, "capacity", model.head_dim};
    std::int64_t count = 0;
    for (const Tensor& tensor : tensors) {
        if (!tensor.name.starts_with(prefix)) continue;
        ++count;
        if (tensor.shape == shape && tensor.dtype == model.dtype) continue;
        throw Error(tensor.name + " is " + tensor.dtype + " " + text_of(tensor.shape) + ", not " +
                    model.dtype + " " + text_of(shape) + " (model.kv_heads, model.head_dim)");
    }
    if (count == 2 * model.layers) return;
    throw Error("model.layers is " + to_string(model.layers) + " and the trunk has " +
                to_string(count) + " " + prefix.substr(0, prefix.size() - 1) + " tensors");
}

// Throws Error unless all tensors of `graph` are such as this runtime fills and reads, with the
// types and ranks that it expects.
void check_tensors(const Graph& graph) {
    for (const auto* tensors : {&graph.inputs, &graph.outputs}) {
        for (const Tensor& tensor : *tensors) {
            if (tensor.name.starts_with(cache_prefix) || tensor.name.starts_with(present_prefix))
                continue;
            const auto kind = tensor_kinds().find(tensor.name);
            if (kind != tensor_kinds().end() && kind->second.dtype == tensor.dtype &&
                kind->second.rank == tensor.shape.size())
                continue;
            throw Error(tensor.name + " of " + graph.file + " cannot be " + tensor.dtype + " " +
                        text_of(tensor.shape));
        }
    }
}

}  // namespace

const Tensor* Graph::find(const std::string& name) const {
    for (const auto* tensors : {&inputs, &outputs}) {
        for (const Tensor& tensor : *tensors) {
            if (tensor.name == name) return &tensor;
        }
    }
    return nullptr;
}

const Graph* PlanInfo::tail(const std::string& sampler) const { return find_in(tails, sampler); }

bool Profile::admits(const std::map<std::string, std::int64_t>& dimensions) const {
    return std::all_of(sizes.begin(), sizes.end(), [&](const auto& item) {
        const auto size = dimensions.find(item.first);
        return size != dimensions.end() && item.second.min <= size->second &&
               size->second <= item.second.max;
    });
}

std::string Manifest::content_hash() const {
    std::map<std::string, std::string> hashes;  // in the order of the names
    for (const auto& [name, info] : files) {
        if (name.ends_with(".onnx") || name.ends_with(".data")) hashes[name] = info.sha256;
    }
    std::string lines;
    for (const auto& [name, hash] : hashes) lines += name + " " + hash + "\n";
    return sha256(lines);
}

const DerivedTrunk* Manifest::derived_trunk(const std::string& device, int slots,
                                            bool lookahead_rows) const {
    const auto preference = [](const DerivedTrunk& each) {
        return std::pair(each.batch.has_value(), !each.lookahead_rows);
    };
    const DerivedTrunk* preferred = nullptr;
    for (const DerivedTrunk& each : derived) {
        if (each.device != device || each.batch.value_or(slots) != slots) continue;
        if (lookahead_rows && !each.lookahead_rows) continue;
        if (preferred == nullptr || preference(each) > preference(*preferred)) preferred = &each;
    }
    return preferred;
}

std::vector<Tree> Manifest::trees(const std::function<bool(const std::string&)>& built) const {
    std::vector<Tree> result;
    for (const PlanInfo& info : plans) {
        const bool all_built =
            std::all_of(info.tails.begin(), info.tails.end(),
                        [&](const auto& tail) { return built(tail.second.file); });
        if (!info.parents.empty() && all_built)
            result.emplace_back(info.parents.begin(), info.parents.end());
    }
    return result;
}

std::set<std::string> Manifest::graph_files() const {
    std::set<std::string> names{trunk.file, logprobs.file};
    for (const PlanInfo& plan : plans) {
        for (const auto& [sampler, tail] : plan.tails) names.insert(tail.file);
    }
    if (processors) names.insert(processors->file);
    for (const DerivedTrunk& each : derived) names.insert(each.file);
    return names;
}

const PlanInfo& Manifest::plan(const std::string& name) const {
    std::string names;
    for (const PlanInfo& info : plans) {
        if (info.name == name) return info;
        names += (names.empty() ? "" : ", ") + info.name;
    }
    throw Error("the bundle has no plan '" + name + "'; it has " + names);
}

const FileInfo* Manifest::file(const std::string& name) const { return find_in(files, name); }

void check_consistency(const Manifest& manifest) {
    const ModelInfo& model = manifest.model;
    Integers tokens = model.eos_token_ids;
    if (model.bos_token_id) tokens.insert(tokens.begin(), *model.bos_token_id);
    for (const std::int64_t token : tokens) {
        if (token >= 0 && token < model.vocab_size) continue;
        throw Error("token " + to_string(token) + " is not in the vocabulary of " +
                    to_string(model.vocab_size) + " (model.vocab_size)");
    }
    check_cache(model, cache_prefix, manifest.trunk.inputs);
    check_cache(model, present_prefix, manifest.trunk.outputs);
    check_tensors(manifest.trunk);
    const Tensor* logits = manifest.trunk.find("logits");
    if (logits == nullptr || logits->shape.back() != Dimension(model.vocab_size)) {
        throw Error("the trunk's logits are not those of model.vocab_size " +
                    to_string(model.vocab_size));
    }
    for (const PlanInfo& info : manifest.plans) {
        for (std::size_t i = 0; i < info.parents.size(); ++i) {
            if (info.parents[i] >= 0 && info.parents[i] <= static_cast<std::int64_t>(i)) continue;
            throw Error("draft " + to_string(i + 1) + " of the tree of " + info.name +
                        " follows no row before it");
        }
        for (const auto& [sampler, tail] : info.tails) check_tensors(tail);
    }
    for (const EngineSet& engines : manifest.engines) {
        for (const std::int64_t width : engines.prefill_widths) {
            if (width <= engines.capacities.back()) continue;
            throw Error("engines " + engines.directory + " have prompt chunks of " +
                        to_string(width) + " tokens and a KV capacity of " +
                        to_string(engines.capacities.back()));
        }
    }
    check_tensors(manifest.logprobs);
    if (manifest.processors) check_tensors(*manifest.processors);
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
    const Json metadata = Json::parse(stated, nullptr, false);
    for (const auto& [name, expected] : facts) {
        const Json actual = metadata.is_object() ? metadata.value(name, Json()) : Json();
        if (actual == expected) continue;
        throw Error("the manifest says " + std::string(name) + " " + expected.dump() + " and " +
                    manifest.trunk.file + " " + (actual.is_null() ? "nothing" : actual.dump()) +
                    "; export the bundle again");
    }
}

Manifest read_manifest(const std::filesystem::path& bundle) {
    const std::filesystem::path path = bundle / manifest_file;
    const auto text = read_text_file(path);
    if (!text) {
        throw Error(bundle.string() + " is not a bundle: it has no " + manifest_file +
                    " (make one with pass-export)");
    }
    Manifest manifest;
    try {
        manifest = parse_manifest(*text);
    } catch (const Error& error) {
        throw Error(path.string() + ": " + error.what());
    }
    try {
        check_consistency(manifest);
    } catch (const Error& error) {
        throw Error(path.string() + " contradicts itself: " + error.what() +
                    "; export the bundle again");
    }
    return manifest;
}

}  // namespace pass
