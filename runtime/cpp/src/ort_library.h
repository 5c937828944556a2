// ONNX Runtime, opened at run time: linking would tie this library to one version of it. Its C API is used as it is, so
// nothing of it is global here, and two libraries can be open at once.
#pragma once

#include <onnxruntime_c_api.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace pass {

template <class Thing>
using Owned = std::unique_ptr<Thing, void (*)(Thing*)>;

class OrtLibrary {
   public:
    // path: empty is $PASS_ONNXRUNTIME, then what this library was built with, then the loader's own search. Throws
    // Error where there is none, or it is too old.
    static std::shared_ptr<const OrtLibrary> open(const std::filesystem::path& path);

    const OrtApi& api() const { return *api_; }
    OrtEnv* environment() const { return environment_.get(); }
    const std::string& version() const { return version_; }
    // Names of the execution providers that it was built with.
    std::vector<std::string> providers() const;
    // Throws Error with `what` and ONNX Runtime's own message where `status` is a failure.
    void check(OrtStatus* status, const std::string& what) const;

   private:
    OrtLibrary(const OrtApi* api, std::string version);

    const OrtApi* api_;
    std::string version_;
    Owned<OrtEnv> environment_;
};

}  // namespace pass
