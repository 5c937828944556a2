#include "bundle/manifest.h"

#include <algorithm>
#include <utility>

#include "bundle/hashes.h"
#include "errors.h"
#include "utf8.h"

namespace pass {

namespace {

template <class Value>
const Value* find_in(const Ordered<Value>& mapping, const std::string& name) {
    const auto found = std::find_if(mapping.begin(), mapping.end(), [&](auto& item) { return item.first == name; });
    return found == mapping.end() ? nullptr : &found->second;
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

bool Profile::admits(const std::map<std::string, std::int64_t>& of) const {
    return std::all_of(sizes.begin(), sizes.end(), [&](const auto& item) {
        const std::int64_t size = of.at(item.first);
        return item.second.min <= size && size <= item.second.max;
    });
}

std::string Manifest::content() const {
    std::map<std::string, std::string> used;
    for (const auto& [name, info] : files) {
        if (name.ends_with(".onnx") || name.ends_with(".data")) used[name] = info.sha256;
    }
    std::string listed;
    for (const auto& [name, hash] : used) listed += name + " " + hash + "\n";
    return sha256(listed);
}

const DerivedTrunk* Manifest::derived_trunk(const std::string& device, int slots, bool lookahead_rows) const {
    const auto rank = [](const DerivedTrunk& each) { return std::pair(each.batch.has_value(), !each.lookahead_rows); };
    const DerivedTrunk* found = nullptr;
    for (const DerivedTrunk& each : derived) {
        if (each.device != device || each.batch.value_or(slots) != slots) continue;
        if (lookahead_rows && !each.lookahead_rows) continue;
        if (found == nullptr || rank(each) > rank(*found)) found = &each;
    }
    return found;
}

std::vector<int> Manifest::tree_sizes(const std::function<bool(const std::string&)>& built) const {
    std::vector<int> found;
    for (const PlanInfo& info : plans) {
        const bool all = std::all_of(info.tails.begin(), info.tails.end(),
                                     [&](const auto& tail) { return built(tail.second.file); });
        if (!info.parents.empty() && all) found.push_back(static_cast<int>(info.parents.size()));
    }
    return found;
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

Manifest read_manifest(const std::filesystem::path& bundle) {
    const std::filesystem::path path = bundle / manifest_file;
    const auto text = read_text_file(path);
    if (!text) {
        throw Error(bundle.string() + " is not a bundle: it has no " + manifest_file + " (make one with pass-export)");
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
        throw Error(path.string() + " contradicts itself: " + error.what() + "; export the bundle again");
    }
    return manifest;
}

}  // namespace pass
