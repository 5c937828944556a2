// Options of a request, and of opening a bundle.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pass/export.h"

namespace pass {

// The tail graphs of a plan, the cheapest first. Each also serves the requests of those before it.
enum class Sampler { greedy, sample, truncated };  // truncated: with top-k, top-p or min-p

// How the next token is drawn: first biases and penalties, then temperature, top-k, top-p, min-p.
struct PASS_API SamplingParams {
    double temperature = 0.0;           // 0 is greedy
    std::int64_t top_k = 0;             // 0 is off, at most 1024
    double top_p = 1.0;                 // above 0; 1 is off
    double min_p = 0.0;                 // 0 to 1; 0 is off
    std::optional<std::uint64_t> seed;  // without one, sampling draws a seed from the system
    double presence_penalty = 0.0;      // subtracted once for a written token; -2 to 2, 0 is off
    double frequency_penalty = 0.0;     // subtracted each time the token was written; -2 to 2
    // Divides positive, multiplies negative logits of tokens so far; 0.01 to 100, 1 is off.
    double repetition_penalty = 1.0;
    std::map<std::int64_t, double> logit_bias{};  // added by token; -100 to 100, at most 1024

    // Throws Error if a number is out of its range.
    void check() const;
    // A copy with a seed: if none was given, one from the system, or 0 if temperature is 0.
    SamplingParams seeded() const;
    // Whether there are biases or penalties.
    bool changes_logits() const;
    // The cheapest tail that computes these parameters.
    Sampler sampler() const;
};

// Clears the bits of the tokens that may not follow `text`. Bit t % 32 of word t / 32 is token t;
// all bits are set before. If no token is left, all are allowed. text: the written tokens, without
// the prompt. It may end with drafts that are then rejected, so the function must keep no state.
// The thread that decodes calls it. An exception ends the request.
using AllowedTokens =
    std::function<void(std::span<const std::int64_t> text, std::span<std::uint32_t> allowed)>;

struct PASS_API GenerateOptions {
    std::int64_t max_new_tokens = 128;
    SamplingParams sampling;
    // "ar", "two-pass", "fused", "tree-3", "tree-5", "tree-8", "tree-16", "fused:4,3,2,2,1" or
    // "tree:2,2,1,0" (sizes of the groups), or "auto": the fastest on this machine. A pass has one
    // plan for all sequences: that of the oldest request that names one. A tree becomes a chain
    // unless all requests name a tree or "auto", and none has logprobs or changes logits.
    std::string plan = "auto";
    // The most look-ahead drafts of a pass: 0 (plain decoding) to the bundle's L, the default.
    std::optional<int> lookahead;
    // "lookahead", "ngram" or "both"; default: "both" for auto, else "lookahead".
    std::optional<std::string> draft;
    // Strings that end the text and are not part of it: at most 64, 4096 bytes in total.
    std::vector<std::string> stop;
    std::vector<std::int64_t> stop_token_ids;  // besides the model's end-of-sequence tokens
    bool ignore_eos = false;
    // Reuse K/V of prompt prefixes even if LoadOptions::prefix_cache is off, and even if that may
    // change bits of the results.
    bool reuse_prefix = false;
    std::string cache_salt;  // a request reuses K/V only of requests with the same salt
    // Report every token's log-probability and those of the 0 to 20 most likely tokens.
    std::optional<int> logprobs;
    // Until this many tokens (at most max_new_tokens) are written, no token that would end the text
    // is drawn, and no stop string ends it. min_tokens, bad_words and allowed_token_ids are not
    // applied where they would leave no token.
    std::int64_t min_tokens = 0;
    std::vector<std::vector<std::int64_t>> bad_words;  // never written; at most 1024
    std::vector<std::int64_t> allowed_token_ids;       // no other tokens are drawn; empty: all
    AllowedTokens allowed_tokens;                      // for grammars; empty: all

    // Throws Error if a value is wrong. `Session::submit` checks what depends on the bundle.
    void check() const;
};

// Allocates the CPU memory of the KV cache, the prefix cache and the buffers of passes. Sessions
// that share it may call it from several threads at once.
class PASS_API Allocator {
   public:
    virtual ~Allocator() = default;
    // `size` bytes, with any alignment; null if there is no memory.
    virtual void* allocate(std::size_t size) noexcept = 0;
    virtual void free(void* block) noexcept = 0;
};

struct PASS_API LoadOptions {
    // cpu; cuda: ONNX Runtime on a GPU; tensorrt, tensorrt-rtx: engine sets that `pass-export
    // build` added to the bundle; tensorrt-rtx-ep: ONNX Runtime's plugin for TensorRT-RTX; auto:
    // engine sets that fit this machine, else CUDA if this ONNX Runtime has it, else the CPU.
    // cuda:1 is the second of the GPUs that CUDA sees.
    std::string device = "auto";
    int threads = 0;               // CPU threads; 0 lets ONNX Runtime choose
    int max_batch_size = 1;        // the number of slots: sequences that decode together
    std::size_t max_queue = 1024;  // requests that may wait for a slot
    // The longest sequence in tokens, a multiple of 4; default: the most possible.
    std::optional<std::int64_t> capacity;
    bool verify = true;  // check the hashes of the bundle's files
    // On the CPU, memory-map the packed weights from the user's cache directory, if the Python
    // runtime has stored them there.
    bool weight_cache = true;
    // Reuse the K/V of earlier requests' prompt prefixes where that changes no bit of the results:
    // with ONNX Runtime on the CPU. Elsewhere only requests with `reuse_prefix` reuse K/V.
    bool prefix_cache = true;
    // If more sequences than this decode at a time, none of them drafts. Default: no limit.
    std::optional<std::int64_t> speculative_max_concurrency;
    // libonnxruntime.so; empty: $PASS_ONNXRUNTIME, else that of the build, else the loader's.
    std::filesystem::path onnxruntime;
    // libnvinfer.so of device tensorrt, libtensorrt_rtx.so of tensorrt-rtx; empty: $PASS_TENSORRT,
    // $PASS_TENSORRT_RTX, or the loader's search.
    std::filesystem::path tensorrt;
    // The plugin of device tensorrt-rtx-ep; empty: $PASS_TENSORRT_RTX_PLUGIN.
    std::filesystem::path plugin;
    std::vector<std::filesystem::path> plugin_libraries;  // opened before the plugin
    std::shared_ptr<Allocator> allocator;                 // null: the heap

    // Throws Error if a value is out of its range.
    void check() const;
};

}  // namespace pass
