// The SHA-256 hashes of a bundle's files, and a cache of them.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bundle/manifest.h"

namespace pass {

// In hexadecimal.
std::string sha256(std::string_view data);

std::string sha256_of_file(const std::filesystem::path& path);

// Of each file of a directory, by name: what identifies its present content.
std::map<std::string, std::string> identities(const std::filesystem::path& bundle);

// Throws Error if a file of the bundle has not the identity that it had before.
void check_unchanged(const std::filesystem::path& bundle, const Manifest& manifest,
                     const std::map<std::string, std::string>& before);

// The hashes of files that were read before, which the Python runtime shares. A file is identified
// by its device, inode, size, mtime and ctime; neither a copy nor `touch` can set the ctime back.
class HashCache {
   public:
    // Reads the user's cache, if it can be read.
    HashCache();

    // Whether `path` has this hash. Throws Error if the file is not cached and cannot be read.
    bool matches(const std::filesystem::path& path, const std::string& sha256);
    // Add the new hashes to the user's cache, if that can be written.
    void save() const;

   private:
    using Line = std::pair<std::string, std::string>;  // the identity of a file, and its SHA-256

    std::vector<Line> lines_;
    std::map<std::string, std::string> hashes_;  // by identity
    std::vector<Line> new_;                      // what `save` adds
};

// Throws Error unless every file of the bundle exists and is the one that was exported. hashes:
// false compares sizes alone.
void verify_files(const std::filesystem::path& bundle, const Manifest& manifest, bool hashes);

}  // namespace pass
