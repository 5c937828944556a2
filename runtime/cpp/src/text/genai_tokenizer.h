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
    // tokenizer: a tokenizer.json. library, onnxruntime: as for `Tokenizer`. Throws Error if a
    // library is missing or cannot read the tokenizer.
    GenaiTokenizer(const std::filesystem::path& tokenizer, const std::filesystem::path& library,
                   const std::filesystem::path& onnxruntime);
    ~GenaiTokenizer();
    GenaiTokenizer(const GenaiTokenizer&) = delete;
    GenaiTokenizer& operator=(const GenaiTokenizer&) = delete;

    // Without special tokens around them. Any thread may call it.
    std::vector<std::int64_t> encode(const std::string& text) const;

   private:
    struct Api;
    std::unique_ptr<const Api> api_;
    void* tokenizer_ = nullptr;
    mutable std::mutex mutex_;
};

}  // namespace pass
