#include "bundle/open_files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "utf8.h"

namespace pass {

MappedFile::MappedFile(const std::filesystem::path& path)
    : file_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    struct stat status {};
    void* data = nullptr;
    if (file_ < 0 || fstat(file_, &status) != 0)
        data = MAP_FAILED;
    else if (status.st_size > 0)  // mmap refuses an empty file
        data = mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, MAP_PRIVATE,
                    file_, 0);
    if (data == MAP_FAILED) {
        const int reason = errno;
        if (file_ >= 0) close(file_);
        throw Error("cannot read " + path.string() + ": " + std::strerror(reason));
    }
    data_ = static_cast<std::byte*>(data);
    size_ = static_cast<std::size_t>(status.st_size);
    time_ = status.st_mtim;
}

MappedFile::~MappedFile() {
    if (data_ != nullptr) munmap(data_, size_);
    close(file_);
}

bool MappedFile::written() const {
    // Not the ctime, which also changes if the file gets another name, or none.
    struct stat status {};
    return fstat(file_, &status) != 0 || static_cast<std::size_t>(status.st_size) != size_ ||
           status.st_mtim.tv_sec != time_.tv_sec || status.st_mtim.tv_nsec != time_.tv_nsec;
}

OpenFiles::OpenFiles(std::filesystem::path folder, const std::set<std::string>& names)
    : folder_(std::move(folder)) {
    for (const std::string& name : names) {
        if (!name.ends_with(".onnx")) {
            data_[name] = std::make_unique<MappedFile>(path(name));
            continue;
        }
        std::optional<std::string> content = read_file(path(name));
        if (!content && errno == ENOENT) continue;  // exported for one device alone
        if (!content)
            throw Error("cannot read " + path(name).string() + ": " + std::strerror(errno));
        graphs_[name] = std::move(*content);
    }
}

OpenFiles OpenFiles::of_graphs(const std::filesystem::path& bundle, const Manifest& manifest) {
    std::set<std::string> names = manifest.graph_files();
    std::error_code error;  // without a directory, graphs are missing
    for (const auto& file : std::filesystem::directory_iterator(bundle, error)) {
        if (file.path().extension() == ".data" && file.is_regular_file(error))
            names.insert(file.path().filename().string());
    }
    return {bundle, names};
}

const std::string& OpenFiles::graph(const std::string& name) const {
    const auto found = graphs_.find(name);
    if (found == graphs_.end())
        throw Error(path(name).string() + " is missing; export the bundle again");
    return found->second;
}

std::exception_ptr OpenFiles::failure() const {
    for (const auto& [name, file] : data_) {
        if (file->written()) {
            return std::make_exception_ptr(
                changed_bundle(name + " was written while the bundle was open"));
        }
    }
    return nullptr;
}

Error changed_bundle(const std::string& how) {
    return Error("the bundle has changed (" + how + "): open it again");
}

}  // namespace pass
