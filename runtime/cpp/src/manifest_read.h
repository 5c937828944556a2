// The manifest's text -> its struct, where every field is of its type and in its range.
#pragma once

#include <string>

#include "errors.h"
#include "manifest.h"

namespace pass {

// Throws Error with what is wrong, without the file's name.
Manifest parse_manifest(const std::string& text);

}  // namespace pass
