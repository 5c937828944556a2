// Text to token ids, by onnxruntime-genai's library, which is opened at run time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace pass {

class GenaiTokenizer {
   public:
    // library: libonnxruntime-genai.so; onnxruntime: the libonnxruntime.so that it needs. Empty:
    // $PASS_ONNXRUNTIME_GENAI and $PASS_ONNXRUNTIME, the paths that the build found, or the
    // loader's search. Throws Error if a library is missing or cannot read `tokenizer`, a file.
    GenaiTokenizer(const std::filesystem::path& tokenizer, const std::filesystem::path& library,
                   const std::filesystem::path& onnxruntime);
    ~GenaiTokenizer();
    GenaiTokenizer(const GenaiTokenizer&) = delete;
    GenaiTokenizer& operator=(const GenaiTokenizer&) = delete;

    // The ids of `text`, without special tokens around them. For any thread.
    std::vector<std::int64_t> encode(const std::string& text) const;

   private:
    struct Api;
    std::unique_ptr<const Api> api_;
    void* tokenizer_ = nullptr;
    mutable std::mutex mutex_;
};

}  // namespace pass
