#include "bundle/integrity.h"

#include <sys/stat.h>
#include <unistd.h>

#include <openssl/evp.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <optional>
#include <vector>

#include "bundle/manifest.h"
#include "bundle/open_files.h"
#include "errors.h"

namespace pass {

namespace {

constexpr const char* hashes_file = "hashes.txt";
constexpr std::size_t max_cached_hashes = 4096;
// Files that changed later are not cached: the next change may not show in a coarse timestamp.
constexpr std::int64_t min_age_ns = 2 * 1000000000L;

std::int64_t nanoseconds(const timespec& time) {
    return std::int64_t{time.tv_sec} * 1000000000L + time.tv_nsec;
}

std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

struct Identity {
    std::string text;          // how a line of the cache identifies the file
    std::int64_t changed = 0;  // the later of mtime and ctime, in nanoseconds
};

std::optional<Identity> identity_of(const std::filesystem::path& path) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) return std::nullopt;
    const std::int64_t mtime = nanoseconds(status.st_mtim), ctime = nanoseconds(status.st_ctim);
    return Identity{std::to_string(status.st_dev) + " " + std::to_string(status.st_ino) + " " +
                        std::to_string(status.st_size) + " " + std::to_string(mtime) + " " +
                        std::to_string(ctime),
                    std::max(mtime, ctime)};
}

// Empty if there is no place for it.
std::filesystem::path cache_directory() {
    if (const std::string own = environment("PASS_CACHE"); !own.empty()) return own;
    if (const std::string base = environment("XDG_CACHE_HOME"); !base.empty())
        return std::filesystem::path(base) / "pass-toolkit";
    const std::string home = environment("HOME");
    return home.empty() ? std::filesystem::path()
                        : std::filesystem::path(home) / ".cache" / "pass-toolkit";
}

}  // namespace

std::map<std::string, std::string> identities(const std::filesystem::path& bundle) {
    std::map<std::string, std::string> found;
    std::error_code error;
    for (const auto& file : std::filesystem::directory_iterator(bundle, error)) {
        if (const auto identity = identity_of(file.path()))
            found[file.path().filename().string()] = identity->text;
    }
    return found;
}

void check_unchanged(const std::filesystem::path& bundle, const Manifest& manifest,
                     const std::map<std::string, std::string>& before) {
    const std::map<std::string, std::string> after = identities(bundle);
    std::vector<std::string> names{manifest_file};
    for (const auto& [name, info] : manifest.files) names.push_back(name);
    for (const std::string& name : names) {
        const auto first = before.find(name), last = after.find(name);
        if (first == before.end() || last == after.end() || first->second != last->second)
            throw changed_bundle("its files were replaced while it was opened");
    }
}

std::string sha256(std::string_view data) {
    std::array<unsigned char, 32> bytes{};
    if (EVP_Digest(data.data(), data.size(), bytes.data(), nullptr, EVP_sha256(), nullptr) != 1)
        throw Error("OpenSSL computes no SHA-256 here");
    std::string text;
    for (const unsigned char byte : bytes) {
        text += "0123456789abcdef"[byte >> 4];
        text += "0123456789abcdef"[byte & 15];
    }
    return text;
}

std::string sha256_of_file(const std::filesystem::path& path) {
    const MappedFile file(path);
    return sha256({reinterpret_cast<const char*>(file.data()), file.size()});
}

HashCache::HashCache() {
    const std::filesystem::path directory = cache_directory();
    if (directory.empty()) return;
    std::ifstream file(directory / hashes_file);
    for (std::string line; std::getline(file, line);) {
        const std::size_t space = line.rfind(' ');
        if (space == std::string::npos) continue;
        lines_.emplace_back(line.substr(0, space), line.substr(space + 1));
        hashes_[lines_.back().first] = lines_.back().second;
    }
}

bool HashCache::matches(const std::filesystem::path& path, const std::string& sha256) {
    const std::optional<Identity> before = identity_of(path);
    const auto cached = before ? hashes_.find(before->text) : hashes_.end();
    if (cached != hashes_.end() && cached->second == sha256) return true;
    const std::string actual = sha256_of_file(path);
    const std::optional<Identity> after = identity_of(path);
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    if (before && after && before->text == after->text &&
        after->changed + min_age_ns < nanoseconds(now)) {
        new_.emplace_back(before->text, actual);
    }
    return actual == sha256;
}

void HashCache::save() const {
    const std::filesystem::path directory = cache_directory();
    if (new_.empty() || directory.empty()) return;
    std::vector<Line> lines = HashCache().lines_;
    for (const Line& line : new_) {
        std::erase_if(lines, [&](const Line& old) { return old.first == line.first; });
        lines.push_back(line);
    }
    std::error_code error;
    std::filesystem::create_directories(directory, error);
    // Each save writes its own file, because two threads may save at once.
    static std::atomic<int> saves = 0;
    const std::filesystem::path part =
        directory / ("." + std::string(hashes_file) + ".part-" + std::to_string(getpid()) + "-" +
                     std::to_string(++saves));
    std::ofstream file(part, std::ios::trunc);
    for (std::size_t i = lines.size() - std::min(lines.size(), max_cached_hashes); i < lines.size();
         ++i) {
        file << lines[i].first << ' ' << lines[i].second << '\n';
    }
    file.close();
    if (!file.fail()) std::filesystem::rename(part, directory / hashes_file, error);
    if (file.fail() || error) std::filesystem::remove(part, error);
}

void verify_files(const std::filesystem::path& bundle, const Manifest& manifest, bool hashes) {
    HashCache cache;
    for (const auto& [name, info] : manifest.files) {
        const std::string path = (bundle / name).string();
        std::error_code error;
        if (!std::filesystem::is_regular_file(path, error))
            throw Error(path + " is missing; export the bundle again");
        const auto size = std::filesystem::file_size(path);
        if (size != static_cast<std::uintmax_t>(info.bytes)) {
            throw Error(path + " has " + std::to_string(size) + " bytes instead of " +
                        std::to_string(info.bytes) + "; copy or export the bundle again");
        }
        if (hashes && !cache.matches(path, info.sha256)) {
            throw Error(path + " does not match its SHA-256 in " + manifest_file +
                        "; copy or export the bundle again");
        }
    }
    cache.save();
}

}  // namespace pass
