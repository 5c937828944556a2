// What ONNX Runtime's CPU kernels compute on this machine, found by running tiny graphs in a few
// milliseconds. As pass_runtime/backends/ort/kernels.py, which explains how kernels differ.
#pragma once

#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "backends/ort/library.h"
#include "bundle/manifest.h"

namespace pass {

// What the kernels compute; by default that of sessions without rounded products.
struct Kernels {
    // Whether products of uint8 and int8 codes are summed exactly.
    bool exact_sums = true;
    // From this number of rows on, results do not depend on it; none: they always may.
    std::optional<int> least_rows = 1;
    // Whether a softmax is the same for any number of masked entries after the others.
    bool equal_softmax = true;

    // As Python's `str(Kernels)`: a part of the key of packed weights.
    std::string text() const;
};

// The bits and block size of weights.
using BlockFormat = std::pair<int, std::int64_t>;

// The formats of the bundle's weights that have blocks.
std::set<BlockFormat> block_formats(const ModelInfo& model);

// The kernels that compute the bundle's products on this CPU, probed once a process.
Kernels find_kernels(const OrtLibrary& library, const Manifest& manifest);

// Whether ONNX Runtime must make the 8-bit weights of the bundle's CPU trunks unsigned, because
// products of uint8 and int8 codes are not summed exactly. Throws Error if it cannot.
bool needs_unsigned_weights(const Kernels& kernels, const std::filesystem::path& bundle,
                            const Manifest& manifest);

}  // namespace pass
