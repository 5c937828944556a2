// Checks that the files of a bundle are the exported ones, by size and SHA-256.

#include <set>

#include "bundle/hashes.h"
#include "bundle/manifest.h"
#include "errors.h"

namespace pass {

namespace {

std::set<std::string> files_in_use(const std::filesystem::path& bundle, const Manifest& manifest) {
    std::set<std::string> used{tokenizer_file, manifest.trunk.file, manifest.logprobs.file};
    for (const PlanInfo& plan : manifest.plans) {
        for (const auto& [sampler, tail] : plan.tails) used.insert(tail.file);
    }
    if (manifest.processors) used.insert(manifest.processors->file);
    for (const DerivedTrunk& derived : manifest.derived) used.insert(derived.file);
    for (const char* name : chat_template_files) {
        if (std::filesystem::exists(bundle / name)) used.insert(name);
    }
    return used;
}

}  // namespace

void verify_files(const std::filesystem::path& bundle, const Manifest& manifest, bool hashes, Remembered* remembered) {
    const auto has_hash = [&](const std::string& path, const std::string& sha256) {
        return remembered != nullptr ? remembered->matches(path, sha256) : sha256_of_file(path) == sha256;
    };
    for (const auto& [name, info] : manifest.files) {
        const std::string path = (bundle / name).string();
        std::error_code error;
        if (!std::filesystem::is_regular_file(path, error)) throw Error(path + " is missing; export the bundle again");
        const auto size = std::filesystem::file_size(path);
        if (size != static_cast<std::uintmax_t>(info.bytes)) {
            throw Error(path + " has " + std::to_string(size) + " bytes instead of " + std::to_string(info.bytes) +
                        "; copy or export the bundle again");
        }
        if (hashes && !has_hash(path, info.sha256)) {
            throw Error(path + " does not match its SHA-256 in " + manifest_file + "; copy or export the bundle again");
        }
    }
    for (const std::string& name : files_in_use(bundle, manifest)) {
        if (manifest.file(name) == nullptr) {
            throw Error((bundle / manifest_file).string() + ": " + name + " is used but not listed under files");
        }
    }
}

}  // namespace pass
