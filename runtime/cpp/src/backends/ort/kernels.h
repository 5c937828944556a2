// Finds the library of CPU kernels (runtime/kernels): operators for ONNX Runtime, of which the
// bundle's trunk for the CPU consists. As pass_runtime/backends/ort/kernels.py.
#pragma once

#include <filesystem>
#include <string>

namespace pass {

// What to do if there is no library.
inline constexpr const char* how_to_get_kernels =
    "run scripts/build_cpp.sh, or set PASS_KERNELS to the path of a libpass_kernels.so";

// A library that was loaded. name: its kernels for this CPU, such as avx512-vnni. missing: why
// there is none; then `path` and `name` are empty.
struct Kernels {
    std::filesystem::path path{};
    std::string name{};
    std::string missing{};
};

// Loads the library: $PASS_KERNELS, or none if that is `off`; by default libpass_kernels.so beside
// the library or program that this code is in, or where `cmake --install` put it.
Kernels find_kernels();

}  // namespace pass
