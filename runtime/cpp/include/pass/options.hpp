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

// The tail graphs of a plan, the cheapest first. A later one also serves requests that need only an
// earlier one.
enum class Sampler { greedy, sample, truncated };  // truncated: with top-k, top-p or min-p

// How the next token is drawn: biases and penalties, then temperature, then top-k, then top-p, then
// min-p.
struct PASS_API SamplingParams {
    double temperature = 0.0;           // 0 is argmax
    std::int64_t top_k = 0;             // 0 is off, at most 1024
    double top_p = 1.0;                 // above 0; 1 is off
    double min_p = 0.0;                 // 0 to 1; 0 is off
    std::optional<std::uint64_t> seed;  // without one, sampling draws a seed from the system
    // subtracted from the logits of tokens in the output; -2 to 2, 0 is off
    double presence_penalty = 0.0;
    // subtracted for every time that the output has the token; -2 to 2
    double frequency_penalty = 0.0;
    // Divides positive and multiplies negative logits of tokens in the prompt or the output; 0.01
    // to 100, 1 is off.
    double repetition_penalty = 1.0;
    // added to the logits of these tokens; -100 to 100, at most 1024
    std::map<std::int64_t, double> logit_bias{};

    // Throws Error if a number is out of its range.
    void check() const;
    // A copy that has a seed: one from the system if none was given, 0 for argmax, which does not
    // use it.
    SamplingParams seeded() const;
    // Whether there are biases or penalties.
    bool penalizes() const;
    // The cheapest tail that computes these parameters.
    Sampler sampler() const;
};

// Clears the bits of the tokens that may not follow `text`. Bit t % 32 of word t / 32 is token t;
// all are set before. If no token is left, all are allowed. text: the written tokens, without the
// prompt. Drafts that are not accepted later may follow them, so the result must depend on `text`
// alone. The thread that decodes calls it. An exception ends the request.
using AllowedTokens =
    std::function<void(std::span<const std::int64_t> text, std::span<std::uint32_t> allowed)>;

struct PASS_API GenerateOptions {
    std::int64_t max_new_tokens = 128;
    SamplingParams sampling;
    // "ar", "two-pass", "fused", "tree-3", "tree-5", "tree-8", "tree-16", "fused:4,3,2,2,1" or
    // "tree:2,2,1,0" (sizes of the groups), or "auto": the fastest on this machine. A pass has one
    // plan for all sequences: that of the oldest request that names one; a tree only if all name a
    // tree or "auto", and none has logprobs or changes logits.
    std::string plan = "auto";
    // drafts per step: 0 (plain decoding) to the bundle's, the default
    std::optional<int> lookahead;
    // "lookahead", "ngram" or "both"; default: both for auto, else lookahead
    std::optional<std::string> draft;
    // Strings that end the text and are not part of it: at most 64, of 4096 bytes together.
    std::vector<std::string> stop;
    // tokens that end it besides the model's end-of-sequence tokens
    std::vector<std::int64_t> stop_token_ids;
    bool ignore_eos = false;
    // Reuse K/V of prompt prefixes even if LoadOptions::prefix_cache is off, or if reuse may change
    // bits of the results.
    bool reuse_prefix = false;
    std::string cache_salt;  // a request reuses K/V only of requests with the same salt
    // report every token's log-probability and those of the 0 to 20 most likely tokens
    std::optional<int> logprobs;
    // Before so many tokens (at most max_new_tokens) are written, no token that would end the text
    // is drawn, and no stop string ends it. min_tokens, bad_words and allowed_token_ids are not
    // applied if they would leave no token.
    std::int64_t min_tokens = 0;
    // token sequences that are never written; at most 1024
    std::vector<std::vector<std::int64_t>> bad_words;
    std::vector<std::int64_t> allowed_token_ids;  // no other tokens are drawn; empty: all
    AllowedTokens allowed_tokens;                 // for grammars; empty: all

    // Throws Error if a value is unknown or out of its range. `Session::submit` checks what depends
    // on the bundle.
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
    int threads = 0;               // of the CPU; 0 is ONNX Runtime's choice
    int max_batch_size = 1;        // the number of slots: sequences that decode together
    std::size_t max_queue = 1024;  // requests that may wait for a slot
    // longest sequence in tokens, a multiple of 4; default: the most possible
    std::optional<std::int64_t> capacity;
    bool verify = true;  // check the hashes of the bundle's files
    // On the CPU, map weights if the Python runtime has put them, packed for this CPU, in the
    // user's cache directory.
    bool weight_cache = true;
    // Reuse the K/V of prompt prefixes that earlier requests had, on engines on which that changes
    // no bit of the results: ONNX Runtime on the CPU. On others only requests with `reuse_prefix`
    // do.
    bool prefix_cache = true;
    // If more sequences than this decode at a time, none of them drafts. Default: the requests'
    // plans decide.
    std::optional<std::int64_t> speculative_max_concurrency;
    // libonnxruntime.so; empty: $PASS_ONNXRUNTIME, then where it was found when this library was
    // built, then the loader's own search.
    std::filesystem::path onnxruntime;
    // libnvinfer.so of device tensorrt, libtensorrt_rtx.so of tensorrt-rtx; empty: $PASS_TENSORRT,
    // $PASS_TENSORRT_RTX, then the loader's own search.
    std::filesystem::path tensorrt;
    // The plugin of device tensorrt-rtx-ep; empty: $PASS_TENSORRT_RTX_PLUGIN.
    std::filesystem::path plugin;
    // that the plugin needs and does not find by itself
    std::vector<std::filesystem::path> plugin_libraries;
    std::shared_ptr<Allocator> allocator;  // null: the heap

    // Throws Error if something is out of its range.
    void check() const;
};

}  // namespace pass
