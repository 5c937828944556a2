#include "backends/ort/kernels.h"

#include <dlfcn.h>

#include <cstdlib>
#include <vector>

#include "utf8.h"

#ifndef PASS_KERNELS_FOLDER
#define PASS_KERNELS_FOLDER "."
#endif

namespace pass {

namespace {

namespace fs = std::filesystem;

constexpr const char* library_file = "libpass_kernels.so";

// The folders of the file that this code is in, and of the program.
std::vector<fs::path> own_folders() {
    std::vector<fs::path> files{"/proc/self/exe"};
    Dl_info info{};
    // For code in the program itself, dladdr has only the word by which it was started.
    if (dladdr(reinterpret_cast<void*>(&find_kernels), &info) != 0 && info.dli_fname != nullptr)
        files.insert(files.begin(), info.dli_fname);
    std::vector<fs::path> folders;
    for (const fs::path& file : files) {
        std::error_code error;
        const fs::path real = fs::canonical(file, error);
        if (!error) folders.push_back(real.parent_path());
    }
    return folders;
}

Kernels load(const fs::path& path) {
    // Never unloaded: sessions keep pointers into it.
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr) return {.missing = one_line(dlerror())};
    const auto name = reinterpret_cast<const char* (*)()>(dlsym(library, "pass_kernels_name"));
    if (name == nullptr) return {.missing = path.string() + " has no kernels"};
    return {.path = path, .name = name()};
}

}  // namespace

Kernels find_kernels() {
    const char* setting = std::getenv("PASS_KERNELS");
    const std::string named = setting == nullptr ? "" : setting;
    if (named == "off") return {.missing = "PASS_KERNELS is off"};
    if (!named.empty()) return load(named);
    const std::vector<fs::path> folders = own_folders();
    for (const fs::path& folder : folders) {
        for (const char* relative : {".", PASS_KERNELS_FOLDER}) {
            const fs::path path = (folder / relative / library_file).lexically_normal();
            if (fs::exists(path)) return load(path);
        }
    }
    return {.missing = folders.empty() ? std::string("there is no ") + library_file
                                       : "there is no " + (folders[0] / library_file).string()};
}

}  // namespace pass
