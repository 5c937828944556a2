// Loads models whose files are symbolic links: ONNX Runtime refuses weights outside the model's
// folder. As `resolve_links` of pass_runtime/backends/ort/external_data.py.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace pass {

// content: the ONNX model. The paths of its files of weights are relative to `folder`.
struct ResolvedModel {
    std::string content;
    std::filesystem::path folder;
};

// The model in the file `model`, with links resolved; none if neither that file nor a file of
// weights is a link. Throws Error if a file of weights is missing.
std::optional<ResolvedModel> resolve_links(const std::filesystem::path& model);

}  // namespace pass
