// A manifest of another model is found out when the graph is opened: trunk.onnx says of itself what it is.
#pragma once

#include <string>

#include "manifest.h"

namespace pass {

// `stated` is the JSON in the metadata of the manifest's trunk. Throws Error where it says otherwise.
void check_trunk_metadata(const Manifest& manifest, const std::string& stated);

}  // namespace pass
