// Paths and small text files, with the messages of Python's pathlib.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace pass {

// As str(pathlib.Path(path)): no `.`, no doubled or last slash.
std::string plain_path(const std::filesystem::path& path);

// As str(pathlib.Path(directory) / name).
std::string joined_path(const std::string& directory, const std::string& name);

// A file of UTF-8. Nothing where there is none; throws Error where there is one that cannot be read.
std::optional<std::string> read_text_file(const std::string& path);

}  // namespace pass
