// What all tails share, in the memory of its files: the random tables, and the draft head. ONNX Runtime maps a file
// anew for every tail, and what was touched of each mapping is resident: the same megabytes again and again.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "manifest.h"
#include "mapped_file.h"
#include "ort_library.h"

namespace pass {

class SharedTensors {
   public:
    SharedTensors(std::shared_ptr<const OrtLibrary> library, const std::filesystem::path& bundle,
                  const Manifest& manifest);

    // By the name that graphs have for them.
    const std::vector<std::pair<std::string, Owned<OrtValue>>>& values() const { return values_; }

   private:
    void add(const std::string& name, const MappedFile& file, std::size_t offset, std::vector<std::int64_t> shape,
             ONNXTensorElementDataType type);

    std::shared_ptr<const OrtLibrary> library_;
    std::vector<std::unique_ptr<MappedFile>> files_;
    std::vector<std::pair<std::string, Owned<OrtValue>>> values_;
};

}  // namespace pass
