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

// The tail graphs of a plan, the cheapest first. A later one also computes everything that the earlier ones do.
enum class Sampler { greedy, sample, truncated };

// How the next token is drawn: biases and penalties, then temperature, then top-k, then top-p, then min-p.
struct PASS_API SamplingParams {
    double temperature = 0.0;           // 0 is argmax
    std::int64_t top_k = 0;             // 0 is off, at most 1024
    double top_p = 1.0;                 // 1 is off
    double min_p = 0.0;                 // 0 is off
    std::optional<std::uint64_t> seed;  // without one, sampling draws a seed from the system
    // Subtracted from the logit of every token that was generated already, once and for every time; -2 to 2, 0 is off.
    double presence_penalty = 0.0, frequency_penalty = 0.0;
    // Divides positive and multiplies negative logits of tokens in the prompt or the output; 0.01 to 100, 1 is off.
    double repetition_penalty = 1.0;
    std::map<std::int64_t, double> logit_bias{};  // added to the logits of these tokens; -100 to 100, at most 1024

    // Throws Error if a number is out of its range.
    void check() const;
    // A copy that has a seed: one from the system if none was given, 0 for argmax, which does not use it.
    SamplingParams seeded() const;
    // Whether there are biases or penalties.
    bool penalizes() const;
    // The cheapest tail that computes these parameters.
    Sampler sampler() const;
};

// Clears the bits of the tokens that may not follow `text`: bit t % 32 of word t / 32 is that of token t. text: the
// tokens that were written, without the prompt. If no token is left, all are allowed. Called from the thread that
// decodes, also for drafts that are not accepted later: what it does must depend on `text` alone. What it throws ends
// its request.
using AllowedTokens = std::function<void(std::span<const std::int64_t> text, std::span<std::uint32_t> allowed)>;

struct PASS_API GenerateOptions {
    std::int64_t max_new_tokens = 128;
    SamplingParams sampling;
    // "ar", "two-pass", "fused", "fused:4,3,2,2,1" (sizes of its groups), or "auto": the fastest on this machine.
    std::string plan = "auto";
    std::optional<int> lookahead;      // drafts per step, at most the bundle's, which is the default; 0: plain
    std::optional<std::string> draft;  // "lookahead", "ngram" or "both"; default: both for auto, else lookahead
    // Strings that end the text and are not part of it: at most 64, of 4096 bytes together.
    std::vector<std::string> stop;
    std::vector<std::int64_t> stop_token_ids;  // tokens that end it besides the model's own
    bool ignore_eos = false;
    bool reuse_prefix = false;    // reuse the K/V of a prompt prefix that an earlier request of this session had, too
    std::string cache_salt;       // K/V are shared among requests with the same one only, whatever their prompts are
    std::optional<int> logprobs;  // report every token's log-probability and those of the 0 to 20 most likely tokens
    // The model's end and the stop tokens are not drawn before so many are written, and stop strings that are complete
    // by then end nothing.
    std::int64_t min_tokens = 0;
    std::vector<std::vector<std::int64_t>> bad_words;  // token sequences that are not written; at most 1024
    std::vector<std::int64_t> allowed_token_ids;       // no other tokens are drawn; empty: all
    AllowedTokens allowed_tokens;                      // for grammars; empty: all

    // Throws Error if something is out of its range.
    void check() const;
};

// The CPU memory that the KV cache, what is kept of it, and the windows are allocated from.
class PASS_API Allocator {
   public:
    virtual ~Allocator() = default;
    // Returns null when there is no memory.
    virtual void* allocate(std::size_t size) noexcept = 0;
    virtual void free(void* block) noexcept = 0;
};

struct PASS_API LoadOptions {
    // cpu; cuda: ONNX Runtime on a GPU; tensorrt, tensorrt-rtx: the bundle's own engine sets; tensorrt-rtx-ep: ONNX
    // Runtime's plugin for TensorRT-RTX; auto: engine sets that fit this machine, else CUDA if this ONNX Runtime has
    // it, else the CPU. A GPU other than the first by its number, of those that CUDA sees: cuda:1.
    std::string device = "auto";
    int threads = 0;                       // of the CPU; 0 is ONNX Runtime's choice
    int max_batch_size = 1;                // sequences that decode together: slots
    std::size_t max_queue = 1024;          // requests that may wait for a slot
    std::optional<std::int64_t> capacity;  // the longest sequence in tokens; default: the model's
    bool verify = true;                    // check the hashes of the bundle's files
    // On the CPU, map the weights that the Python runtime has kept packed in the user's cache directory, if it has.
    bool weight_cache = true;
    // Use K/V of earlier requests again for the tokens that prompts begin with, on engines with which that changes no
    // bit of what follows: ONNX Runtime on the CPU. On others only requests with `reuse_prefix` do.
    bool prefix_cache = true;
    // With more sequences than this decoding at a time, all of them are decoded plainly, whatever plans they name.
    // Default: as plans say, of which "auto" drafts if that is faster.
    std::optional<std::int64_t> speculative_max_concurrency;
    // libonnxruntime.so; empty: $PASS_ONNXRUNTIME, then where it was found when this library was built, then the
    // loader's own search.
    std::filesystem::path onnxruntime;
    // libnvinfer.so of device tensorrt, libtensorrt_rtx.so of tensorrt-rtx; empty: $PASS_TENSORRT, $PASS_TENSORRT_RTX,
    // then the loader's own search.
    std::filesystem::path tensorrt;
    // The plugin of device tensorrt-rtx-ep; empty: $PASS_TENSORRT_RTX_PLUGIN.
    std::filesystem::path plugin;
    std::vector<std::filesystem::path> plugin_libraries;  // opened before it, since it does not find them itself
    std::shared_ptr<Allocator> allocator;                 // null: the heap

    // Throws Error if something is out of its range.
    void check() const;
};

}  // namespace pass
