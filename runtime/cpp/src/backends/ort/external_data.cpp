#include "backends/ort/external_data.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "backends/ort/protobuf.h"
#include "errors.h"

namespace pass {

namespace {

namespace fs = std::filesystem;

// The numbers in onnx.proto of the fields that lead to a file's name: a model's graph, its
// initializers, the entries of an initializer's external data, and an entry's key and value.
constexpr std::uint64_t graph_field = 7, initializer_field = 5, external_data_field = 13,
                        key_field = 1, value_field = 2;
constexpr const char* location_key = "location";  // the value of such an entry is a file's name

bool has_links(const fs::path& folder) {
    std::error_code ignored;
    const fs::directory_iterator files(folder, ignored);
    return std::any_of(fs::begin(files), fs::end(files),
                       [&](const fs::directory_entry& file) { return file.is_symlink(ignored); });
}

// The key and the value of an entry.
std::pair<std::string, std::string> entry_of(std::string_view content) {
    std::pair<std::string, std::string> result;
    for (const protobuf::Field& field : protobuf::fields(content)) {
        if (field.number == key_field) result.first = field.content;
        if (field.number == value_field) result.second = field.content;
    }
    return result;
}

// The model with `edit` applied to all entries of external data.
std::string edit_entries(std::string_view model,
                         const std::function<std::string(std::string_view)>& edit) {
    return protobuf::replace(model, graph_field, [&](std::string_view graph) {
        return protobuf::replace(graph, initializer_field, [&](std::string_view tensor) {
            return protobuf::replace(tensor, external_data_field, edit);
        });
    });
}

// The names of the model's files of weights. None if it is no model: ONNX Runtime then refuses it.
std::set<std::string> locations(std::string_view model) {
    std::set<std::string> result;
    try {
        edit_entries(model, [&](std::string_view entry) {
            const auto [key, value] = entry_of(entry);
            if (key == location_key) result.insert(value);
            return std::string(entry);
        });
    } catch (const Error&) {
        return {};
    }
    return result;
}

// The innermost folder that has all of `files`, in itself or in folders in it.
fs::path common_folder(const std::map<std::string, fs::path>& files) {
    fs::path common = files.begin()->second.parent_path();
    for (const auto& [name, file] : files) {
        const fs::path folder = file.parent_path();
        const auto end =
            std::mismatch(common.begin(), common.end(), folder.begin(), folder.end()).first;
        fs::path shared;
        for (auto part = common.begin(); part != end; ++part) shared /= *part;
        common = shared;
    }
    return common;
}

}  // namespace

std::optional<ResolvedModel> resolve_links(const fs::path& model) {
    const fs::path parent = model.parent_path();
    const bool model_is_link = fs::is_symlink(model);
    if (!model_is_link && !has_links(parent)) return std::nullopt;  // without reading the model
    std::ifstream file(model, std::ios::binary);
    const std::string content(std::istreambuf_iterator<char>(file), {});
    const std::set<std::string> names = locations(content);
    const auto is_link = [&](const std::string& name) { return fs::is_symlink(parent / name); };
    if (names.empty() || (!model_is_link && std::none_of(names.begin(), names.end(), is_link)))
        return std::nullopt;
    std::map<std::string, fs::path> files;
    for (const std::string& name : names) {
        std::error_code error;
        files[name] = fs::canonical(parent / name, error);
        if (!error) continue;
        throw Error((parent / name).string() + " is missing, weights of " + model.string() +
                    "; export the bundle again");
    }
    const fs::path folder = common_folder(files);
    const auto edit = [&](std::string_view entry) {
        auto [key, value] = entry_of(entry);
        if (key == location_key) value = files.at(value).lexically_relative(folder).string();
        return protobuf::encode(key_field, key) + protobuf::encode(value_field, value);
    };
    return ResolvedModel{edit_entries(content, edit), folder};
}

}  // namespace pass
