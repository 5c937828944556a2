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

// A bundle's tokenizer.json. Turns ids into text by itself, and text into ids with
// onnxruntime-genai's library. Supports byte-level tokenizers (of GPT-2, Llama 3, Qwen and
// SmolLM2), and those with byte fallback (of Llama 2, Mistral, Gemma and Phi-3), which only turn
// ids into text. Move-only; any thread may call its methods.
class PASS_API Tokenizer {
   public:
    // bundle: its directory. library: libonnxruntime-genai.so; empty: $PASS_ONNXRUNTIME_GENAI, else
    // what the build found, else the loader's search. onnxruntime: as in LoadOptions. Throws Error
    // if a file is missing, or the tokenizer is of another kind.
    explicit Tokenizer(const std::filesystem::path& bundle,
                       const std::filesystem::path& library = {},
                       const std::filesystem::path& onnxruntime = {});
    Tokenizer(Tokenizer&&) noexcept;
    Tokenizer& operator=(Tokenizer&&) noexcept;
    ~Tokenizer();

    // With the special tokens that the tokenizer adds to every text. Throws Error if `text` is not
    // UTF-8 or has a null character, or the tokenizer has byte fallback.
    std::vector<std::int64_t> encode(const std::string& text) const;
    // Leaves out special tokens and unknown ids. Each invalid character becomes U+FFFD; with byte
    // fallback, each byte of it does.
    std::string decode(const std::vector<std::int64_t>& ids) const;
    // For `Session::submit`, not for programs. stop: strings that end the text, but not within the
    // first `min_tokens` tokens. prompt: it may end within a character.
    std::unique_ptr<TextReader> reader(const std::vector<std::string>& stop,
                                       const std::vector<std::int64_t>& prompt = {},
                                       std::int64_t min_tokens = 0) const;

   private:
    struct Data;
    std::unique_ptr<Data> data_;
};

}  // namespace pass
