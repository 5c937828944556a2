// ONNX Runtime's library, opened at run time, because linking would tie libpass to one version. Its
// C API is used without globals, so that two versions can be open at once.
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
    std::vector<std::string> providers() const;
    // Releases `status`. If it is an error, throws Error with `what` and ONNX Runtime's message.
    void check(OrtStatus* status, std::string_view what = "onnxruntime") const;
    // What `create`, a function of the C API, makes. release: its counterpart.
    template <class Create, class Thing, class... Arguments>
    Owned<Thing> make(Create create, void (*release)(Thing*), Arguments... arguments) const {
        Thing* object = nullptr;
        check(create(arguments..., &object));
        return {object, release};
    }

   private:
    const OrtApi* api_;
    Owned<OrtEnv> environment_;
};

}  // namespace pass
