// Text to token ids and back, by a bundle's tokenizer.json.
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

// Text -> ids is done by onnxruntime-genai's library, ids -> text here. Byte-level tokenizers
// (GPT-2's, and those of Llama 3, Qwen and SmolLM2) do both. Tokenizers with byte fallback (Llama
// 2's, Mistral's, Gemma's, Phi-3's) only turn ids into text, and need no library. Move-only; any
// thread may call its methods.
class PASS_API Tokenizer {
   public:
    // bundle: its directory. library: libonnxruntime-genai.so; empty: $PASS_ONNXRUNTIME_GENAI, then
    // the path that the build found, then the loader's own search. onnxruntime: as in LoadOptions.
    // Throws Error if the tokenizer or a library is missing, or the tokenizer is of another kind.
    explicit Tokenizer(const std::filesystem::path& bundle,
                       const std::filesystem::path& library = {},
                       const std::filesystem::path& onnxruntime = {});
    Tokenizer(Tokenizer&&) noexcept;
    Tokenizer& operator=(Tokenizer&&) noexcept;
    ~Tokenizer();

    // The ids of `text`, with the special tokens that the tokenizer adds. Throws Error if `text` is
    // not UTF-8 or has a null character, or the tokenizer has byte fallback.
    std::vector<std::int64_t> encode(const std::string& text) const;
    // The text of `ids`, without special tokens and unknown ids. Invalid UTF-8 becomes U+FFFD: one
    // for each character, with byte fallback one for each byte.
    std::string decode(const std::vector<std::int64_t>& ids) const;
    // For `Session::submit`, not for programs: a reader that turns the tokens of one request into
    // text as they come. stop: strings that end the text, but not within the first `min_tokens`
    // tokens. prompt: the ids of the request's prompt.
    std::unique_ptr<TextReader> reader(const std::vector<std::string>& stop,
                                       const std::vector<std::int64_t>& prompt = {},
                                       std::int64_t min_tokens = 0) const;

   private:
    struct Data;
    std::unique_ptr<Data> data_;
};

}  // namespace pass
