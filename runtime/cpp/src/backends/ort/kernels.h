// Finds libpass_kernels.so (runtime/kernels): ONNX Runtime's operators of the trunk for the CPU.
#pragma once

#include <filesystem>
#include <string>

namespace pass {

inline constexpr const char* how_to_get_kernels =
    "run scripts/build_cpp.sh, or set PASS_KERNELS to the path of a libpass_kernels.so";

// name: of the kernels for this CPU, such as avx512-vnni. missing: why there are none.
struct Kernels {
    std::filesystem::path path{};
    std::string name{};
    std::string missing{};
};

// $PASS_KERNELS, or none if that is `off`; else beside the library or program that this code is in,
// or where `cmake --install` put it.
Kernels find_kernels();

}  // namespace pass
