// ONNX Runtime's library. It is opened at run time, because linking would tie libpass to one
// version. Its C API is used without globals, so that two versions can be open at once.
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

// ONNX Runtime's level of the same severity.
OrtLoggingLevel severity_of(LogLevel level);

// An object of the C API, with the function that releases it.
template <class Thing>
using Owned = std::unique_ptr<Thing, void (*)(Thing*)>;

class OrtLibrary {
   public:
    // path: as LoadOptions::onnxruntime. Throws Error if no library is found, or it is too old.
    static std::shared_ptr<const OrtLibrary> open(const std::filesystem::path& path);
    // `api` must outlive this object.
    explicit OrtLibrary(const OrtApi* api);

    const OrtApi& api() const { return *api_; }
    OrtEnv* environment() const { return environment_.get(); }
    // The execution providers that this ONNX Runtime was built with.
    std::vector<std::string> providers() const;
    // Releases `status`. If it is an error, throws Error with `what` and ONNX Runtime's message.
    void check(OrtStatus* status, std::string_view what = "onnxruntime") const;
    // The object that `create`, a function of the C API, makes from `arguments`. release: the
    // function that releases such an object.
    template <class Create, class Thing, class... Arguments>
    Owned<Thing> make(Create create, void (*release)(Thing*), Arguments... arguments) const {
        Thing* object = nullptr;
        check(create(arguments..., &object));
        return {object, release};
    }
    // The `size` bytes at `address`, in that memory, as a tensor. They are not copied.
    Owned<OrtValue> tensor(const OrtMemoryInfo* memory, std::byte* address, std::size_t size,
                           const std::vector<std::int64_t>& shape,
                           ONNXTensorElementDataType type) const;

   private:
    const OrtApi* api_;
    Owned<OrtEnv> environment_;
};

}  // namespace pass
