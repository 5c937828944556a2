// A deserialized TensorRT engine: its profiles, and contexts bound to device memory.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "cuda.h"
#include "manifest.h"
#include "trt_api.h"

namespace pass {

// One way to run an engine: the profile, its inputs' shapes, and an address for every tensor.
struct TrtBinding {
    int profile = 0;
    std::map<std::string, Shape> shapes;
    std::map<std::string, std::byte*> addresses;

    bool operator==(const TrtBinding&) const = default;
};

// One engine file. There is one execution context for each profile in use.
class TrtEngine {
   public:
    // Throws Error where it cannot be loaded, or is not what the manifest says.
    TrtEngine(TrtApi& api, Cuda& cuda, const std::filesystem::path& path, const EngineFile& file);

    // Output -> the input whose memory it shares.
    const Ordered<std::string>& aliases() const { return file_.aliases; }
    // The first profile that admits `sizes`, by symbolic dimension.
    int profile(const std::map<std::string, std::int64_t>& sizes) const;
    // Run once, behind what the stream has to do.
    void enqueue(const TrtBinding& binding);
    // Whether a CUDA graph can hold it.
    bool capturable(const TrtBinding& binding) { return context(binding.profile).capturable(cuda_.stream()); }

   private:
    void check() const;
    void bind(TrtContext& context, const TrtBinding& binding);
    TrtContext& context(int profile);
    Error again(const std::string& what) const;

    Cuda& cuda_;
    std::string path_;
    const EngineFile& file_;
    std::unique_ptr<TrtPlan> plan_;
    std::byte* scratch_ = nullptr;  // one pass runs at a time, so that all contexts can work in the same memory
    std::map<int, std::unique_ptr<TrtContext>> contexts_;  // by profile; they go before the plan
    std::map<int, TrtBinding> bound_;                      // what each of them was given
};

}  // namespace pass
