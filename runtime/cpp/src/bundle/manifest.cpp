#include "bundle/manifest.h"

#include <algorithm>

#include "bundle/consistency.h"
#include "bundle/manifest_read.h"
#include "bundle/noise.h"
#include "bundle/sha256.h"
#include "bundle/strict_json.h"
#include "errors.h"
#include "text_file.h"

namespace pass {

namespace {

const std::string noise_scheme = "block-race-1";
constexpr std::int64_t noise_block_size = 8;  // token ids in a block
constexpr std::int64_t noise_bits = 30;

template <class Value>
const Value* find_in(const Ordered<Value>& mapping, const std::string& name) {
    const auto found = std::find_if(mapping.begin(), mapping.end(), [&](auto& item) { return item.first == name; });
    return found == mapping.end() ? nullptr : &found->second;
}

void check_noise(const NoiseInfo& noise) {
    if (noise.scheme != noise_scheme || noise.block_size != noise_block_size || noise.row != noise_row ||
        noise.bits != noise_bits) {
        throw Error("noise scheme " + strict::repr(std::string_view(noise.scheme)) + " is not this version's '" +
                    noise_scheme + "'; export again");
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

std::string Manifest::trunk_file(const std::string& device) const {
    for (const DerivedTrunk& trunk_of : derived) {
        if (trunk_of.device == device) return trunk_of.file;
    }
    return trunk.file;
}

const PlanInfo& Manifest::plan(const std::string& name) const {
    std::string names;
    for (const PlanInfo& info : plans) {
        if (info.name == name) return info;
        names += (names.empty() ? "" : ", ") + info.name;
    }
    throw Error("the bundle has no plan " + strict::repr(std::string_view(name)) + "; it has " + names);
}

const std::string* Manifest::fed(const std::string& output) const { return find_in(feeds, output); }

const FileInfo* Manifest::file(const std::string& name) const { return find_in(files, name); }

Manifest read_manifest(const std::filesystem::path& bundle) {
    const std::string directory = plain_path(bundle), path = joined_path(directory, manifest_file);
    const auto text = read_text_file(path);
    if (!text) {
        throw Error(directory + " is not a bundle: it has no " + manifest_file + " (make one with pass-export)");
    }
    Manifest manifest;
    try {
        manifest = parse_manifest(*text);
        check_noise(manifest.noise);
    } catch (const Error& error) {
        throw Error(path + ": " + error.what());
    }
    if (const auto problem = inconsistency(manifest)) {
        throw Error(path + " contradicts itself: " + *problem + "; export the bundle again");
    }
    const std::vector<Plan> plans = bundle_plans(static_cast<int>(manifest.lookahead.length));
    for (std::size_t i = 0; i < plans.size(); ++i) {
        manifest.plans[i].constants = constants_of(plans[i], manifest.model.vocab_size);
    }
    return manifest;
}

}  // namespace pass
