// Tensors that all tails share, mapped from their files once: the tables of random numbers, and the draft head. ONNX
// Runtime would map the files again for every tail, and each mapping would take memory of its own.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/mapped_file.h"
#include "backends/ort/library.h"
#include "bundle/manifest.h"

namespace pass {

class SharedTensors {
   public:
    SharedTensors(std::shared_ptr<const OrtLibrary> library, const std::filesystem::path& bundle,
                  const Manifest& manifest);

    // By their names in the graphs.
    const std::vector<std::pair<std::string, Owned<OrtValue>>>& values() const { return values_; }

   private:
    void add(const std::string& name, const MappedFile& file, std::size_t offset, std::size_t size,
             const std::vector<std::int64_t>& shape, ONNXTensorElementDataType type);

    std::shared_ptr<const OrtLibrary> library_;
    std::vector<std::unique_ptr<MappedFile>> files_;
    std::vector<std::pair<std::string, Owned<OrtValue>>> values_;
};

}  // namespace pass
