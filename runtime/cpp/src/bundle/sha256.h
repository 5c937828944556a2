// SHA-256, by OpenSSL.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace pass {

// The hash of `data` in hexadecimal.
std::string sha256(std::string_view data);

// The hash of a file. Throws Error where it cannot be read.
std::string sha256_of_file(const std::filesystem::path& path);

}  // namespace pass
