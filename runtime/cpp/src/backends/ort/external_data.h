// Models whose files are links, for ONNX Runtime, which refuses weights that are not in the folder
// of the model. As `resolve_links` of pass_runtime/backends/ort/external_data.py.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace pass {

// content: the model, with the places of its files of weights relative to `folder`.
struct ResolvedModel {
    std::string content;
    std::filesystem::path folder;
};

// The model with the places that links lead to, if the model itself or files of weights are links;
// else none. Throws Error if a file of weights is not there.
std::optional<ResolvedModel> resolve_links(const std::filesystem::path& model);

}  // namespace pass
