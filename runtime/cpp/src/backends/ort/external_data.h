// Models whose files are links: ONNX Runtime refuses weights outside the folder of the model. As
// `resolve_links` of pass_runtime/backends/ort/external_data.py.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace pass {

// content: the model, with paths of its files of weights relative to `folder`.
struct ResolvedModel {
    std::string content;
    std::filesystem::path folder;
};

// The model with links resolved; none if neither the model nor a file of weights is a link. Throws
// Error if a file of weights is missing.
std::optional<ResolvedModel> resolve_links(const std::filesystem::path& model);

}  // namespace pass
