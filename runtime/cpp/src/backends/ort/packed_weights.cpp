#include "backends/ort/packed_weights.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "bundle/integrity.h"
#include "log.h"

namespace pass {

namespace {

// An entry of the cache is a folder with the trunk, its weights, and a note that lists these files.
constexpr const char *graph_file = "trunk.onnx", *note_file = "packed.json";
constexpr int entry_format = 2;  // FORMAT_VERSION of packing.py

// The fields of /proc/cpuinfo that `describe_cpu` takes, on x86 and on ARM.
constexpr std::array cpu_fields = {
    "vendor_id",        "cpu family",  "model",    "model name",   "stepping", "CPU implementer",
    "CPU architecture", "CPU variant", "CPU part", "CPU revision", "flags",    "Features"};

// `text` without white space at its ends.
std::string trimmed(std::string_view text) {
    const char* spaces = " \t\r";
    const std::size_t first = text.find_first_not_of(spaces);
    if (first == std::string_view::npos) return "";
    return std::string(text.substr(first, text.find_last_not_of(spaces) - first + 1));
}

// Whether an entry's files have the sizes and hashes that its note lists.
bool is_intact(const std::filesystem::path& entry) {
    std::ifstream file(entry / note_file);
    if (!file) return false;
    try {
        const nlohmann::json note = nlohmann::json::parse(file);
        if (!note.contains("files") || !note["files"].contains(graph_file)) return false;
        HashCache cache;
        for (const auto& [name, info] : note["files"].items()) {
            const std::filesystem::path path = entry / name;
            if (std::filesystem::file_size(path) != info["bytes"].get<std::uintmax_t>())
                return false;
            if (!cache.matches(path, info["sha256"].get<std::string>())) return false;
        }
        cache.save();
        return true;
    } catch (const std::exception&) {  // The note is damaged, or a file is missing.
        return false;
    }
}

}  // namespace

std::string describe_cpu(const std::filesystem::path& cpu_info) {
    std::ifstream file(cpu_info);
    std::vector<std::string> lines;
    bool has_instructions = false;
    for (std::string line; std::getline(file, line);) {
        const std::size_t colon = line.find(':');
        const std::string field = trimmed(std::string_view(line).substr(0, colon));
        if (colon == std::string::npos ||
            std::find(cpu_fields.begin(), cpu_fields.end(), field) == cpu_fields.end())
            continue;
        has_instructions = has_instructions || field == "flags" || field == "Features";
        const std::string described =
            field + ": " + trimmed(std::string_view(line).substr(colon + 1)) + "\n";
        if (std::find(lines.begin(), lines.end(), described) == lines.end())
            lines.push_back(described);
    }
    std::string text;
    for (const std::string& line : lines) text += line;
    return has_instructions ? text : "";
}

std::optional<std::filesystem::path> packed_trunk(const OrtLibrary& library,
                                                  const std::filesystem::path& bundle,
                                                  const Manifest& manifest, const std::string& file,
                                                  const Kernels& kernels) {
    const std::string weights_file = manifest.trunk.file + ".data", cpu = describe_cpu();
    const std::filesystem::path cache = cache_directory();
    const FileInfo *graph = manifest.file(file), *weights = manifest.file(weights_file);
    if (graph == nullptr || weights == nullptr || cpu.empty() || cache.empty()) return std::nullopt;
    // Packed weights belong to the manifest's hashes, so the files must be known to have these.
    const HashCache hashes;
    if (!hashes.knows(bundle / file, graph->sha256) ||
        !hashes.knows(bundle / weights_file, weights->sha256)) {
        return std::nullopt;
    }
    // As `weight_key` of packing.py.
    const std::string key = sha256("format " + std::to_string(entry_format) + "\nonnxruntime " +
                                   library.build() + "\ngraph " + graph->sha256 + "\nweights " +
                                   weights->sha256 + "\n" + kernels.text() + "\n" + cpu);
    const std::filesystem::path entry = cache / "packed" / key.substr(0, 32);
    if (!is_intact(entry)) return std::nullopt;
    // Python removes the entries with the oldest times when the cache is full.
    std::error_code ignored;  // the entry may be another user's
    std::filesystem::last_write_time(entry, std::filesystem::file_time_type::clock::now(), ignored);
    log(LogLevel::info, file + ": weights are mapped from " + entry.string());
    return entry / graph_file;
}

}  // namespace pass
