// The SHA-256 hashes of a bundle's files, computed by OpenSSL, and a cache of them.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pass {

// The hash of `data` in hexadecimal.
std::string sha256(std::string_view data);

// The hash of a file. Throws Error if it cannot be read.
std::string sha256_of_file(const std::filesystem::path& path);

// PASS_CACHE, else pass-toolkit under the user's cache directory; empty if there is none.
std::filesystem::path cache_directory();

// The hashes of files that were read before, kept in the user's cache directory because reading a
// large model takes long. The Python runtime uses the same cache. A file is identified by its
// device, inode, size, mtime and ctime; neither a copy nor `touch` can set the ctime back.
class HashCache {
   public:
    // Reads the cache. It is empty if there is no usable cache directory.
    HashCache();

    // Whether the cache has this hash for `path`. The file's content is not read.
    bool knows(const std::filesystem::path& path, const std::string& sha256) const;
    // Whether `path` has this hash. Reads files that are not cached; throws Error if that fails.
    bool matches(const std::filesystem::path& path, const std::string& sha256);
    // Add the new hashes to those that other processes have written meanwhile. Failures are
    // ignored: the files are then read again next time.
    void save() const;

   private:
    using Line = std::pair<std::string, std::string>;  // the identity of a file, and its SHA-256

    std::vector<Line> lines_;                   // in the order of the file
    std::map<std::string, std::string> known_;  // hashes by identity
    std::vector<Line> new_;                     // for `save`
};

}  // namespace pass
