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
    // tokenizer: the path of a tokenizer.json. library: that of libonnxruntime-genai.so.
    // onnxruntime: that of the libonnxruntime.so that it needs. If one of these two is empty, it is
    // $PASS_ONNXRUNTIME_GENAI or $PASS_ONNXRUNTIME, the path that the build found, or what the
    // loader finds. Throws Error if a library is missing or cannot read the tokenizer.
    GenaiTokenizer(const std::filesystem::path& tokenizer, const std::filesystem::path& library,
                   const std::filesystem::path& onnxruntime);
    ~GenaiTokenizer();
    GenaiTokenizer(const GenaiTokenizer&) = delete;
    GenaiTokenizer& operator=(const GenaiTokenizer&) = delete;

    // The ids of `text`, without special tokens around them. Any thread may call it.
    std::vector<std::int64_t> encode(const std::string& text) const;

   private:
    struct Api;
    std::unique_ptr<const Api> api_;
    void* tokenizer_ = nullptr;
    mutable std::mutex mutex_;
};

}  // namespace pass
