#include "text/genai_tokenizer.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "errors.h"
#include "utf8.h"

namespace pass {

namespace {

namespace fs = std::filesystem;

// Open the library that is named by the first of these that is not empty: `given`, the environment
// variable, `built_with` (what the build found), `file_name`. It is never closed, because its
// threads keep running.
void* open_library(const fs::path& given, const char* variable, const char* built_with,
                   const char* file_name) {
    const char* set = std::getenv(variable);
    const std::string name = !given.empty()                   ? given.string()
                             : set != nullptr && *set != '\0' ? set
                             : *built_with != '\0'            ? built_with
                                                              : file_name;
    void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle != nullptr) return handle;
    throw Error(std::string("text needs ") + file_name + ", which cannot be opened (" +
                one_line(dlerror()) + "); set " + variable + " to it, or use token ids");
}

// A temporary directory with the three files that the library reads.
class Folder {
   public:
    explicit Folder(const fs::path& tokenizer) {
        std::string name = (fs::temp_directory_path() / "pass-tokenizer-XXXXXX").string();
        if (mkdtemp(name.data()) == nullptr)
            throw Error("cannot make a directory in " + fs::temp_directory_path().string());
        path_ = name;
        fs::create_symlink(fs::absolute(tokenizer), path_ / "tokenizer.json");
        // With this class the library does what tokenizer.json says, whatever the model.
        std::ofstream(path_ / "tokenizer_config.json") << R"({"tokenizer_class": "GPT2Tokenizer"})";
        // The library reads the settings of a model, too, but encoding text uses none of them.
        std::ofstream(path_ / "genai_config.json")
            << R"({"model": {"type": "llama", "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,)"
            << R"( "context_length": 4, "vocab_size": 1, "decoder": {"filename": "none"}}, "search": {}})";
    }
    ~Folder() {
        std::error_code ignored;
        fs::remove_all(path_, ignored);
    }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;

    const fs::path& path() const { return path_; }

   private:
    fs::path path_;
};

}  // namespace

// The functions of onnxruntime-genai's C interface. Those that return a result can fail: the result
// is null, or has an error.
struct GenaiTokenizer::Api {
    void* (*create_tokenizer)(const char* directory, void** tokenizer);
    void (*destroy_tokenizer)(void* tokenizer);
    void* (*create_sequences)(void** sequences);
    void (*destroy_sequences)(void* sequences);
    void* (*encode)(const void* tokenizer, const char* text, void* sequences);
    std::size_t (*count)(const void* sequences, std::size_t index);
    const std::int32_t* (*data)(const void* sequences, std::size_t index);
    const char* (*error_of)(const void* result);
    void (*destroy_result)(void* result);

    explicit Api(void* library) {
        take(library, "OgaCreateTokenizerFromPath", create_tokenizer);
        take(library, "OgaDestroyTokenizer", destroy_tokenizer);
        take(library, "OgaCreateSequences", create_sequences);
        take(library, "OgaDestroySequences", destroy_sequences);
        take(library, "OgaTokenizerEncode", encode);
        take(library, "OgaSequencesGetSequenceCount", count);
        take(library, "OgaSequencesGetSequenceData", data);
        take(library, "OgaResultGetError", error_of);
        take(library, "OgaDestroyResult", destroy_result);
    }

    template <class Function>
    static void take(void* library, const char* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        if (function == nullptr)
            throw Error(std::string("this onnxruntime-genai has no ") + name +
                        "; use 0.18 or newer");
    }

    void check(void* result, const std::string& what) const {
        if (result == nullptr) return;
        const std::string reason = one_line(error_of(result));
        destroy_result(result);
        throw Error(what + ": " + reason);
    }
};

GenaiTokenizer::GenaiTokenizer(const fs::path& tokenizer, const fs::path& library,
                               const fs::path& onnxruntime) {
    // onnxruntime-genai aborts the process if libonnxruntime.so was not opened before.
    open_library(onnxruntime, "PASS_ONNXRUNTIME", PASS_DEFAULT_ONNXRUNTIME, "libonnxruntime.so");
    api_ = std::make_unique<Api>(open_library(library, "PASS_ONNXRUNTIME_GENAI",
                                              PASS_DEFAULT_ONNXRUNTIME_GENAI,
                                              "libonnxruntime-genai.so"));
    const Folder folder(tokenizer);
    api_->check(api_->create_tokenizer(folder.path().c_str(), &tokenizer_),
                "onnxruntime-genai does not read " + tokenizer.string());
}

GenaiTokenizer::~GenaiTokenizer() { api_->destroy_tokenizer(tokenizer_); }

std::vector<std::int64_t> GenaiTokenizer::encode(const std::string& text) const {
    const std::lock_guard lock(mutex_);
    void* sequences = nullptr;
    api_->check(api_->create_sequences(&sequences), "cannot encode");
    const std::unique_ptr<void, void (*)(void*)> owner(sequences, api_->destroy_sequences);
    api_->check(api_->encode(tokenizer_, text.c_str(), sequences), "cannot encode");
    const std::size_t count = api_->count(sequences, 0);
    const std::int32_t* const data = api_->data(sequences, 0);
    std::vector<std::int64_t> ids;
    // The library returns -1 for a byte that has no token. `tokenizers` leaves such bytes out.
    std::copy_if(data, data + count, std::back_inserter(ids),
                 [](std::int32_t id) { return id >= 0; });
    return ids;
}

}  // namespace pass
