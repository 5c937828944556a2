#include "backends/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "errors.h"

namespace pass {

MappedFile::MappedFile(const std::filesystem::path& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat about {};
    if (file < 0 || fstat(file, &about) != 0) {
        const std::string why = std::strerror(errno);
        if (file >= 0) close(file);
        throw Error("cannot read " + path.string() + ": " + why);
    }
    size_ = static_cast<std::size_t>(about.st_size);
    void* data = size_ == 0 ? nullptr : mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
    const int failed = errno;
    close(file);
    if (data == MAP_FAILED) throw Error("cannot read " + path.string() + ": " + std::strerror(failed));
    data_ = static_cast<std::byte*>(data);
}

MappedFile::~MappedFile() {
    if (data_ != nullptr) munmap(data_, size_);
}

}  // namespace pass
