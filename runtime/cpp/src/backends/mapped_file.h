// A file, mapped into memory for reading.
#pragma once

#include <cstddef>
#include <filesystem>

namespace pass {

class MappedFile {
   public:
    // Throws Error where it cannot be read.
    explicit MappedFile(const std::filesystem::path& path);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::byte* data() const { return data_; }
    std::size_t size() const { return size_; }

   private:
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace pass
