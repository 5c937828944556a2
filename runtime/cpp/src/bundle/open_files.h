// The files of a session, which are read or mapped when it is opened: it goes on with them if the
// bundle's name leads to another bundle later, as after `pass-export --force`. Whoever writes into
// a mapped file changes what the session reads; `OpenFiles::failure` notices that.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "bundle/manifest.h"
#include "errors.h"

namespace pass {

class MappedFile {
   public:
    // Throws Error if the file cannot be read.
    explicit MappedFile(const std::filesystem::path& path);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::byte* data() const { return data_; }
    std::size_t size() const { return size_; }
    // Whether the file was written since it was mapped.
    bool written() const;

   private:
    int file_;
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
    struct timespec time_ {};  // of its last change
};

class OpenFiles {
   public:
    OpenFiles() = default;
    // Reads files that end in .onnx, and maps the others. Throws Error.
    OpenFiles(std::filesystem::path folder, const std::set<std::string>& names);
    // The graphs that there are, and all data.
    static OpenFiles of_graphs(const std::filesystem::path& bundle, const Manifest& manifest);

    std::filesystem::path path(const std::string& name) const { return folder_ / name; }
    // Throws Error if the graph is missing.
    const std::string& graph(const std::string& name) const;
    // The mapped files by name.
    const std::map<std::string, std::unique_ptr<MappedFile>>& data() const { return data_; }
    // The error if a file was written, after which none can be used; else null.
    std::exception_ptr failure() const;

   private:
    std::filesystem::path folder_;
    std::map<std::string, std::string> graphs_;
    std::map<std::string, std::unique_ptr<MappedFile>> data_;
};

Error changed_bundle(const std::string& how);

}  // namespace pass
