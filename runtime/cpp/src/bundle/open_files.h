// The files that a session goes on using after it was opened.
//
// All are read or mapped when it is opened. So it goes on with them if the bundle's name leads to
// another bundle later, as after `pass-export --force`, or to none. Whoever writes into a mapped
// file changes what the session reads; `OpenFiles::failure` notices that.
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

// A file, mapped into memory for reading.
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

// Files of a folder as they are when this is made.
class OpenFiles {
   public:
    // No files.
    OpenFiles() = default;
    // Reads those of `names` that end in .onnx, and maps the others. Throws Error if that fails.
    OpenFiles(std::filesystem::path folder, const std::set<std::string>& names);
    // The graphs of a bundle that there are, and all data.
    static OpenFiles of_graphs(const std::filesystem::path& bundle, const Manifest& manifest);

    std::filesystem::path path(const std::string& name) const { return folder_ / name; }
    // The content of a graph's file. Throws Error if it is missing.
    const std::string& graph(const std::string& name) const;
    // The mapped files by name.
    const std::map<std::string, std::unique_ptr<MappedFile>>& data() const { return data_; }
    // The error after which the files cannot be used any more, as one was written; else null.
    std::exception_ptr failure() const;

   private:
    std::filesystem::path folder_;
    std::map<std::string, std::string> graphs_;
    std::map<std::string, std::unique_ptr<MappedFile>> data_;
};

// The error for a bundle that is not the one that was opened any more.
Error changed_bundle(const std::string& how);

}  // namespace pass
