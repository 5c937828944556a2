// trunk.onnx states the model that it was exported from, so that the manifest of another model is detected.
#pragma once

#include <string>

#include "bundle/manifest.h"

namespace pass {

// Throws Error where `stated`, the JSON in the trunk's metadata, differs from the manifest.
void check_trunk_metadata(const Manifest& manifest, const std::string& stated);

}  // namespace pass
