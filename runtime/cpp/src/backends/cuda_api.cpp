// Finds the functions of CudaApi in libcudart, and the GPUs.
#include "backends/cuda.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <set>
#include <vector>

#include "errors.h"

namespace pass {

namespace {

constexpr int major_attribute = 75, minor_attribute = 76;  // cudaDevAttrComputeCapability...
constexpr std::size_t properties_bytes = 1 << 14;          // more than cudaDeviceProp has
constexpr int old_driver_error = 35;                       // cudaErrorInsufficientDriver
// Errors of a driver or device that is missing, too old, or in use.
const std::set<int> no_device_errors{3, 46, 100, 101, 802, 803, 804};
// Major version of CUDA -> the first branch of NVIDIA's Linux driver that runs it.
const std::map<int, int> min_driver_branch{{12, 525}, {13, 580}};

// CUDA's number of a version, such as 13040, as text: "13.4".
std::string version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void* open_library() {
    const char* named = std::getenv("PASS_CUDART");
    if (named != nullptr && *named != '\0') return dlopen(named, RTLD_NOW | RTLD_NODELETE);
    for (const char* name : {"libcudart.so.13", "libcudart.so.12", "libcudart.so"}) {
        if (void* handle = dlopen(name, RTLD_NOW | RTLD_NODELETE)) return handle;
    }
    return nullptr;
}

// Sets `function` to the library's function `name`. Throws Error if there is none.
template <class Result, class... Arguments>
void find(void* handle, const char* name, std::function<Result(Arguments...)>& function) {
    const auto address = reinterpret_cast<Result (*)(Arguments...)>(dlsym(handle, name));
    if (address == nullptr)
        throw Error("the CUDA runtime has no " + std::string(name) + "; set PASS_CUDART to one");
    function = address;
}

}  // namespace

CudaApi CudaApi::open() {
    void* handle = open_library();
    if (handle == nullptr) {
        throw Error("the CUDA runtime cannot be opened (" + std::string(dlerror()) +
                    "); set PASS_CUDART to libcudart.so, or use --device cpu");
    }
    CudaApi api;
#define FIND(member, name, ...) find(handle, #name, api.member);
    PASS_CUDA_FUNCTIONS(FIND)
#undef FIND
    const bool has_v2 = dlsym(handle, "cudaGetDeviceProperties_v2") != nullptr;  // only in CUDA 12
    find(handle, has_v2 ? "cudaGetDeviceProperties_v2" : "cudaGetDeviceProperties",
         api.device_properties);
    return api;
}

// After most of these errors, by CUDA's documentation, the process must end; after the others the
// memory, link or context is gone.
const char* CudaApi::device_lost_name(int code) {
    static const std::map<int, const char*> codes{
        {214, "cudaErrorECCUncorrectable"},
        {220, "cudaErrorNvlinkUncorrectable"},
        {226, "cudaErrorContained"},
        {700, "cudaErrorIllegalAddress"},
        {702, "cudaErrorLaunchTimeout"},
        {709, "cudaErrorContextIsDestroyed"},
        {710, "cudaErrorAssert"},
        {714, "cudaErrorHardwareStackError"},
        {715, "cudaErrorIllegalInstruction"},
        {716, "cudaErrorMisalignedAddress"},
        {717, "cudaErrorInvalidAddressSpace"},
        {718, "cudaErrorInvalidPc"},
        {719, "cudaErrorLaunchFailure"},
        {721, "cudaErrorTensorMemoryLeak"},
        {810, "cudaErrorMpsClientTerminated"},
        {911, "cudaErrorExternalDevice"},
    };
    const auto entry = codes.find(code);
    return entry == codes.end() ? nullptr : entry->second;
}

void CudaApi::check(int code, const char* name) const {
    if (code == 0) return;
    if (const char* error_name = device_lost_name(code)) {
        throw DeviceLost("the GPU works no more for this process (CUDA error " +
                         std::to_string(code) + ", " + error_name + ", " + name +
                         "); restart the process");
    }
    std::string hint;
    if (no_device_errors.contains(code)) hint = "; is the GPU visible to nvidia-smi?";
    if (code == old_driver_error) hint = driver_hint();
    throw Error(std::string(name) + " failed with CUDA error " + std::to_string(code) + " (" +
                error_string(code) + ")" + hint);
}

std::string CudaApi::driver_hint() const {
    int driver = 0, library = 0;
    if (driver_version(&driver) != 0 || runtime_version(&library) != 0) {
        return "; the driver is older than the CUDA library: update it (nvidia-smi shows the CUDA "
               "version that it runs)";
    }
    if (driver == 0) return "; there is no NVIDIA driver here: is the GPU visible to nvidia-smi?";
    const int major = library / 1000;
    const auto branch = min_driver_branch.find(major);
    const std::string branch_text = branch == min_driver_branch.end()
                                        ? ""
                                        : ", " + std::to_string(branch->second) + " or newer";
    return "; the driver is older than the CUDA library: it runs CUDA up to " +
           version_text(driver) + ", and the library is CUDA " + version_text(library) +
           "; update to a driver for CUDA " + std::to_string(major) + branch_text +
           " (nvidia-smi shows which is installed)";
}

void CudaApi::require_gpu(int ordinal) const {
    int count = 0;
    check(device_count(&count), "cudaGetDeviceCount");
    if (ordinal < count) return;
    std::string visible = "no GPU is visible";
    if (count == 1) visible = "1 GPU is visible, number 0";
    if (count > 1) {
        visible =
            std::to_string(count) + " GPUs are visible, numbers 0 to " + std::to_string(count - 1);
    }
    throw Error("there is no GPU " + std::to_string(ordinal) + ": " + visible +
                " (see nvidia-smi, and CUDA_VISIBLE_DEVICES)");
}

std::optional<Gpu> find_gpu(const CudaApi& api, int ordinal) {
    if (ordinal > 0) api.require_gpu(ordinal);
    int count = 0, major = 0, minor = 0;
    if (api.device_count(&count) != 0 || count <= ordinal) return std::nullopt;
    std::vector<char> properties(properties_bytes);
    if (api.device_attribute(&major, major_attribute, ordinal) != 0 ||
        api.device_attribute(&minor, minor_attribute, ordinal) != 0 ||
        api.device_properties(properties.data(), ordinal) != 0) {
        return std::nullopt;
    }
    return Gpu{properties.data(), "sm" + std::to_string(major) + std::to_string(minor)};
}

std::string why_no_gpu(const CudaApi& api) {
    int count = 0;
    try {
        api.check(api.device_count(&count), "cudaGetDeviceCount");
    } catch (const Error& error) {
        return error.what();
    }
    if (count == 0)
        return "CUDA sees no GPU; is it visible to nvidia-smi, and not hidden by "
               "CUDA_VISIBLE_DEVICES?";
    return "CUDA sees " + std::to_string(count) +
           " GPUs, but cannot read their properties; update the driver";
}

}  // namespace pass
