// How ONNX Runtime's CPU kernels round on this machine, found by running tiny graphs (probes) in a
// few milliseconds. As pass_runtime/backends/ort/kernels.py, which explains how kernels differ.
#pragma once

#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "backends/ort/library.h"
#include "bundle/manifest.h"

namespace pass {

// How kernels round. The defaults are those of all devices but the CPU.
struct Kernels {
    // Whether products of uint8 and int8 codes are summed exactly.
    bool exact_sums = true;
    // With at least so many rows, results do not depend on their number; none: with any, they may.
    std::optional<int> least_rows = 1;
    // Whether a softmax does not depend on the number of masked entries after the others.
    bool equal_softmax = true;

    // The same text as Python's `str(Kernels)`, because it is a part of the key of packed weights.
    std::string text() const;
};

// The bits of a weight, and how many weights share a scale.
using BlockFormat = std::pair<int, std::int64_t>;

// The formats of the bundle's weights in blocks.
std::set<BlockFormat> block_formats(const ModelInfo& model);

// The kernels of this CPU for the bundle's formats. They are probed once a process.
Kernels find_kernels(const OrtLibrary& library, const Manifest& manifest);

// Whether ONNX Runtime must make the 8-bit weights of the bundle's CPU trunks unsigned, because
// products of uint8 and int8 codes are not summed exactly. Throws Error if it cannot.
bool needs_unsigned_weights(const Kernels& kernels, const std::filesystem::path& bundle,
                            const Manifest& manifest);

}  // namespace pass
