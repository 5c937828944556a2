// ONNX Runtime, opened at run time, since linking would tie libpass to one version of it. Its C API is used directly
// and without globals, so that two versions can be open at once.
#pragma once

#include <onnxruntime_c_api.h>

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "log.h"

namespace pass {

// ONNX Runtime's levels are the same numbers; its fatal is an error.
OrtLoggingLevel severity_of(LogLevel level);

template <class Thing>
using Owned = std::unique_ptr<Thing, void (*)(Thing*)>;

class OrtLibrary {
   public:
    // path: empty is $PASS_ONNXRUNTIME, then the one found at build time, then the loader's own search. Throws Error
    // if there is none, or it is too old.
    static std::shared_ptr<const OrtLibrary> open(const std::filesystem::path& path);
    // Over a table of functions, which has to live as long as this does.
    OrtLibrary(const OrtApi* api, const std::string& version);

    const OrtApi& api() const { return *api_; }
    // Its version and how it was built, as Python's `__version__` and `get_build_info()`.
    const std::string& build() const { return build_; }
    OrtEnv* environment() const { return environment_.get(); }
    // The execution providers that this ONNX Runtime was built with.
    std::vector<std::string> providers() const;
    // Throws Error with `what` and ONNX Runtime's own message if `status` is a failure.
    void check(OrtStatus* status, std::string_view what = "onnxruntime") const;
    // What `create` makes, a function of the C API whose last argument is where to put it.
    template <class Create, class Thing, class... Given>
    Owned<Thing> make(Create create, void (*release)(Thing*), Given... given) const {
        Thing* made = nullptr;
        check(create(given..., &made));
        return {made, release};
    }
    // A piece of memory as a tensor, on the device of `place`.
    Owned<OrtValue> tensor(const OrtMemoryInfo* place, std::byte* address, std::size_t size,
                           const std::vector<std::int64_t>& shape, ONNXTensorElementDataType type) const;

   private:
    const OrtApi* api_;
    std::string build_;
    Owned<OrtEnv> environment_;
};

}  // namespace pass
