// The SHA-256 hashes of a bundle's files, computed by OpenSSL, and a cache of them.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bundle/manifest.h"

namespace pass {

// The hash of `data` in hexadecimal.
std::string sha256(std::string_view data);

// The hash of a file. Throws Error if it cannot be read.
std::string sha256_of_file(const std::filesystem::path& path);

// What identifies the present content of each file of a directory, by name; empty if it cannot be
// read.
std::map<std::string, std::string> identities(const std::filesystem::path& bundle);

// Throws Error if a file of the bundle has not the identity that it had before.
void check_unchanged(const std::filesystem::path& bundle, const Manifest& manifest,
                     const std::map<std::string, std::string>& before);

// The directory for caches: $PASS_CACHE, else the user's cache directory/pass-toolkit; or empty.
std::filesystem::path cache_directory();

// The hashes of files that were read before, kept in the user's cache directory because reading a
// large model takes long. The Python runtime uses the same cache. A file is identified by its
// device, inode, size, mtime and ctime; neither a copy nor `touch` can set the ctime back.
class HashCache {
   public:
    // Reads the cache's file. The cache is empty if that cannot be read.
    HashCache();

    // Whether `path` has this hash. Reads a file that is not cached; throws Error if that fails.
    bool matches(const std::filesystem::path& path, const std::string& sha256);
    // Write the new hashes, and those that other processes have written meanwhile, to the cache's
    // file. Failures are ignored: the bundle's files are then read again next time.
    void save() const;

   private:
    using Line = std::pair<std::string, std::string>;  // the identity of a file, and its SHA-256

    std::vector<Line> lines_;                    // in the order of the cache's file
    std::map<std::string, std::string> hashes_;  // by identity
    std::vector<Line> new_;                      // what `save` adds
};

}  // namespace pass
