// The files of a bundle: their hashes, by OpenSSL, and those that were computed before.
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

// Hashes of files that were read before, in the user's cache directory, since reading a large model takes many seconds.
// The Python runtime uses the same file. A file is identified by device, inode, size, mtime and ctime. No copy and no
// `touch` can set the ctime back.
class HashCache {
   public:
    // The hashes that are known now; none if the cache directory cannot be read.
    HashCache();

    // Whether the cache has this hash for `path`, whose content is not read.
    bool knows(const std::filesystem::path& path, const std::string& sha256) const;
    // Whether `path` has this hash. The file is read if its hash is not known. Throws Error if it cannot be read.
    bool matches(const std::filesystem::path& path, const std::string& sha256);
    // Add the new hashes to the file, which other processes may have changed meanwhile. Does nothing if it cannot.
    void save() const;

   private:
    using Line = std::pair<std::string, std::string>;  // the identity of a file, and its SHA-256

    std::vector<Line> lines_;
    std::map<std::string, std::string> known_;
    std::vector<Line> new_;
};

}  // namespace pass
