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
#include "pass/sampling_fields.h"

namespace pass {

// The kinds of tail graphs, by rising cost: each can also compute what the ones before it compute.
enum class Sampler { greedy, sample, truncated };  // truncated: with top-k, top-p or min-p

// How the next token is drawn: first biases and penalties, then temperature, top-k, top-p, min-p.
struct PASS_API SamplingParams {
    // temperature, top_k and so on: sampling_fields.h has the type, the range and the meaning.
#define PASS_MEMBER(type, name, value, ...) type name = value;
    PASS_SAMPLING_FIELDS(PASS_MEMBER)
#undef PASS_MEMBER
    std::optional<std::uint64_t> seed{};  // none: a random seed
    // Token id -> a number from -100 to 100 to add to its logit; at most 1024 tokens.
    std::map<std::int64_t, double> logit_bias{};

    // Throws Error if a number is out of its range.
    void check() const;
    // With a seed (random, or 0 for greedy), top_k 0 in place of -1, and temperature 0 in place of
    // top_p 0.
    SamplingParams resolved() const;
    bool changes_logits() const;
    // The cheapest tail that can sample with these parameters.
    Sampler sampler() const;
};

// Clears the bits of the tokens that may not follow `text`; if it clears all, all are allowed.
// text: without the prompt, but perhaps with drafts that are then rejected, so the result must
// depend on `text` alone. allowed: token t is bit t % 32 of word t / 32. The thread that decodes
// calls it. If it throws, the request ends with that error.
using AllowedTokens =
    std::function<void(std::span<const std::int64_t> text, std::span<std::uint32_t> allowed)>;

struct PASS_API GenerateOptions {
    std::int64_t max_new_tokens = 128;
    SamplingParams sampling;
    // "auto" (the fastest on this machine), "ar", "two-pass", "fused", or "fused:4,3,2,2,1" (how
    // many look-ahead rows follow the root, and each draft). All sequences of a pass have the plan
    // of the oldest request that names one.
    std::string plan = "auto";
    // The most drafts of a pass, from any source: 0 (plain decoding) to L of the bundle. Default:
    // L, and up to 16 for copies.
    std::optional<int> lookahead;
    // "lookahead", "ngram" or "both", which is the default if `plan` is "auto". For other plans it
    // is "lookahead".
    std::optional<std::string> draft;
    // Strings that end the text and are not part of it: at most 64, 4096 bytes in total.
    std::vector<std::string> stop;
    std::vector<std::int64_t> stop_token_ids;  // tokens that also end the text
    bool ignore_eos = false;                   // the model's own end tokens do not end the text
    // Reuse K/V of an earlier request that begins with the same tokens, even if that may change
    // bits of the results.
    bool reuse_prefix = false;
    std::string cache_salt;  // a request reuses K/V only of requests with the same salt
    // Report each token's log-probability, and those of the 0 to 20 likeliest tokens in its place.
    std::optional<int> logprobs;
    // Until this many tokens (at most max_new_tokens) are written, no token that would end the text
    // is drawn, and no stop string ends it. Where one of min_tokens, bad_words and
    // allowed_token_ids would leave no token, that option is not applied.
    std::int64_t min_tokens = 0;
    // Sequences of tokens that the text does not contain; at most 1024.
    std::vector<std::vector<std::int64_t>> bad_words;
    std::vector<std::int64_t> allowed_token_ids;  // only these are drawn; empty: all tokens
    AllowedTokens allowed_tokens;                 // for grammars; empty: all tokens are allowed

    // Throws Error if a value is wrong. `Session::submit` checks what depends on the bundle.
    void check() const;
};

// Allocates a session's CPU memory. Several threads may call it at once if several sessions have
// it.
class PASS_API Allocator {
   public:
    virtual ~Allocator() = default;
    // `size` bytes, of any alignment; null if there is no memory.
    virtual void* allocate(std::size_t size) noexcept = 0;
    virtual void free(void* block) noexcept = 0;
};

struct PASS_API LoadOptions {
    // cpu, cuda: ONNX Runtime. tensorrt: engines that `pass-export build` added to the bundle.
    // auto: engines that fit this machine, else cuda if ONNX Runtime and the machine have it, else
    // cpu. cuda:1: the second GPU.
    std::string device = "auto";
    int threads = 0;               // CPU threads; 0 lets ONNX Runtime choose
    int max_batch_size = 1;        // slots: the most sequences that decode together
    std::size_t max_queue = 1024;  // requests that may wait for a slot
    // The KV capacity in tokens: a multiple of 4. Default: the model's, or that of the engines.
    std::optional<std::int64_t> capacity;
    bool verify = true;  // compare the hashes of the bundle's files with the manifest's
    // Reuse K/V of earlier requests that begin with the same tokens, where this changes no bit of
    // the results: with ONNX Runtime on the CPU.
    bool prefix_cache = true;
    // If more sequences than this decode at a time, all decode without drafts. Default: no limit.
    std::optional<std::int64_t> speculative_max_concurrency;
    // libonnxruntime.so; empty: $PASS_ONNXRUNTIME, or what the build found, or the loader's search.
    std::filesystem::path onnxruntime;
    // libnvinfer.so for device tensorrt; empty: $PASS_TENSORRT, else the loader's search.
    std::filesystem::path tensorrt;
    std::shared_ptr<Allocator> allocator;  // null: the heap

    // Throws Error if a value is out of its range.
    void check() const;
};

}  // namespace pass
