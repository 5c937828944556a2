// Parses the text of a manifest, and checks the type and range of every field.
#pragma once

#include <string>

#include "bundle/manifest.h"
#include "errors.h"

namespace pass {

// Throws Error with the first problem; the message does not name the file.
Manifest parse_manifest(const std::string& text);

}  // namespace pass
