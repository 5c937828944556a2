// ONNX Runtime, opened at run time, since linking would tie libpass to one version of it. Its C API is used directly
// and without globals, so that two versions can be open at once.
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
    // path: empty is $PASS_ONNXRUNTIME, then the one found at build time, then the loader's own search. Throws Error
    // where there is none, or it is too old.
    static std::shared_ptr<const OrtLibrary> open(const std::filesystem::path& path);

    const OrtApi& api() const { return *api_; }
    OrtEnv* environment() const { return environment_.get(); }
    const std::string& version() const { return version_; }
    // The execution providers that this ONNX Runtime was built with.
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
