// Text, for who does not bring token ids: an optional layer over a bundle's tokenizer.json.
#pragma once

#include <pass/export.h>
#include <pass/error.hpp>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace pass {

class TextReader;

// Text -> ids is done by onnxruntime-genai's library, ids -> text here. Byte-level tokenizers (GPT-2's, and those of
// Llama 3, Qwen and SmolLM2) are understood. Move-only; its methods are for any thread.
class PASS_API Tokenizer {
   public:
    // Throws Error where the bundle's tokenizer is another kind, or a library is missing. library: of
    // onnxruntime-genai; empty: $PASS_ONNXRUNTIME_GENAI, then where the build found it. onnxruntime: as LoadOptions'.
    explicit Tokenizer(const std::filesystem::path& bundle, const std::filesystem::path& library = {},
                       const std::filesystem::path& onnxruntime = {});
    Tokenizer(Tokenizer&&) noexcept;
    Tokenizer& operator=(Tokenizer&&) noexcept;
    ~Tokenizer();

    // With the tokenizer's own special tokens. Throws Error where `text` is not UTF-8 or has a null character.
    std::vector<std::int64_t> encode(const std::string& text) const;
    // Special tokens are left out; bytes that are no character become U+FFFD.
    std::string decode(const std::vector<std::int64_t>& ids) const;
    // The text of one request as its tokens come; `stop` strings end it.
    std::unique_ptr<TextReader> reader(const std::vector<std::string>& stop) const;

   private:
    struct Data;
    std::unique_ptr<Data> data_;
};

}  // namespace pass
