// Paths and small text files, with the messages of Python's pathlib.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace pass {

// The path as pathlib writes it: without `.`, doubled slashes and a slash at the end.
std::string plain_path(const std::filesystem::path& path);

// `directory`/`name`, as pathlib writes it.
std::string joined_path(const std::string& directory, const std::string& name);

// The contents of a UTF-8 file; none where there is no such file. Throws Error where it cannot be read.
std::optional<std::string> read_text_file(const std::string& path);

}  // namespace pass
