#include <pass/text.hpp>

#include <algorithm>
#include <optional>

#include "bundle/manifest.h"
#include "text/genai_tokenizer.h"
#include "text/text_stream.h"
#include "text/vocabulary.h"
#include "utf8.h"

namespace pass {

struct Tokenizer::Data {
    Data(const std::string& path, const std::filesystem::path& library,
         const std::filesystem::path& onnxruntime);

    std::shared_ptr<const Vocabulary> vocabulary;
    std::optional<GenaiTokenizer> encoder;  // none if the tokenizer has byte fallback
};

namespace {

std::shared_ptr<const Vocabulary> read_vocabulary(const std::string& path) {
    const auto text = read_text_file(path);
    if (!text) throw Error(path + " is missing; export the bundle again");
    try {
        return std::make_shared<const Vocabulary>(*text);
    } catch (const Error& error) {
        throw Error(path + " " + error.what());
    }
}

}  // namespace

Tokenizer::Data::Data(const std::string& path, const std::filesystem::path& library,
                      const std::filesystem::path& onnxruntime)
    : vocabulary(read_vocabulary(path)) {
    if (!vocabulary->byte_fallback()) encoder.emplace(path, library, onnxruntime);
}

Tokenizer::Tokenizer(const std::filesystem::path& bundle, const std::filesystem::path& library,
                     const std::filesystem::path& onnxruntime) {
    data_ = std::make_unique<Data>((bundle / tokenizer_file).string(), library, onnxruntime);
}

Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

std::vector<std::int64_t> Tokenizer::encode(const std::string& text) const {
    if (!data_->encoder) {
        throw Error(
            "only the Python runtime turns text into the ids of a tokenizer with byte fallback; "
            "use token ids");
    }
    if (text.find('\0') != std::string::npos || lossy_utf8(text) != text)
        throw Error("the text is not UTF-8, or has a null character; use token ids");
    std::vector<std::int64_t> ids = data_->vocabulary->prefix();
    for (const auto& [part, token] : data_->vocabulary->split(text)) {
        const auto part_ids = token >= 0 ? std::vector{token} : data_->encoder->encode(part);
        ids.insert(ids.end(), part_ids.begin(), part_ids.end());
    }
    const auto& suffix = data_->vocabulary->suffix();
    ids.insert(ids.end(), suffix.begin(), suffix.end());
    return ids;
}

std::string Tokenizer::decode(const std::vector<std::int64_t>& ids) const {
    std::string bytes;
    for (const std::int64_t id : ids) bytes += data_->vocabulary->bytes(id);
    const std::size_t leading_spaces = std::min(bytes.find_first_not_of(' '), bytes.size());
    bytes.erase(0, std::min(leading_spaces, data_->vocabulary->stripped_spaces()));
    // Tokenizers with byte fallback replace each invalid byte, others each invalid character.
    return lossy_utf8(bytes, data_->vocabulary->byte_fallback());
}

std::unique_ptr<TextReader> Tokenizer::reader(const std::vector<std::string>& stop,
                                              const std::vector<std::int64_t>& prompt,
                                              std::int64_t min_tokens) const {
    return std::make_unique<TextStream>(data_->vocabulary, stop, prompt, min_tokens);
}

}  // namespace pass
