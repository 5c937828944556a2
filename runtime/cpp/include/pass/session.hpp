// A session has no thread of its own that decodes: a thread that waits for a token, or calls
// `step`, decodes for all requests. Any thread may use a session. Only one thread at a time may use
// a generation, but any may call `cancel`.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pass/error.hpp"
#include "pass/event.hpp"
#include "pass/export.h"
#include "pass/options.hpp"

namespace pass {

class Core;
class Tokenizer;

// A directory that pass-export wrote. Copies share its manifest.
class PASS_API Bundle {
   public:
    // verify: compare the hashes of all files, not only their sizes. Throws Error.
    explicit Bundle(const std::filesystem::path& path, bool verify = true);

    const std::filesystem::path& path() const;
    const std::string& name() const;
    std::int64_t vocab_size() const;
    std::int64_t max_capacity() const;            // the longest sequence in tokens
    int lookahead() const;                        // L, the most look-ahead drafts of a pass
    const std::string& rule() const;              // how drafts are accepted: "match", "rejection"
    const std::string& dtype() const;             // of activations and KV cache
    const std::string& weights() const;           // of the linear layers: "full", "int4", ...
    const std::string& lookahead_source() const;  // where the look-ahead embeddings come from
    const std::vector<std::int64_t>& eos_token_ids() const;
    std::optional<std::int64_t> bos_token_id() const;

    struct Data;
    explicit Bundle(std::shared_ptr<const Data> data);  // for the library's own tests

   private:
    friend class Session;
    std::shared_ptr<const Data> data_;
};

struct Request {
    std::vector<std::int64_t> prompt_ids;  // at least one
    GenerateOptions options;
};

// A submitted request, which the destructor cancels. If it outlives its session, it returns the
// tokens that were written before; then `next` throws Error. Move-only.
class PASS_API Generation {
   public:
    Generation(Generation&&) noexcept;
    Generation& operator=(Generation&&) noexcept;
    ~Generation();

    // The tokens of the next pass; none at the end. Decodes, or waits while another thread decodes.
    // Throws the error that ended the request once.
    std::optional<Event> next();
    // As `next`, but neither decodes nor waits. None if there are no tokens yet, and at the end,
    // when `finish_reason` has a value.
    std::optional<Event> poll();
    // Read until the end. Throws Error.
    void run();
    // After the pass in progress, whose tokens can still be read. For any thread.
    void cancel();

    // The tokens that `next` and `poll` have returned so far.
    const std::vector<Token>& tokens() const;
    std::vector<std::int64_t> token_ids() const;
    const std::string& text() const;
    // None until `next` or `poll` returns the end or throws the error.
    std::optional<FinishReason> finish_reason() const;
    StopReason stop_reason() const;  // monostate until then
    const std::vector<std::int64_t>& prompt_ids() const;
    std::uint64_t seed() const;  // of sampling: a request with this seed writes the same text
    bool logprobs() const;       // whether the request asked for log-probabilities
    Stats stats() const;

   private:
    friend class Session;
    struct Data;
    explicit Generation(std::unique_ptr<Data> data);
    std::unique_ptr<Data> data_;
};

// One model, which decodes as many sequences at a time as it has slots. Move-only.
class PASS_API Session {
   public:
    // Throws Error if an option is wrong, something is missing, or memory runs out.
    explicit Session(Bundle bundle, const LoadOptions& options = {});
    // Throws Error as the constructors of Bundle and Session do.
    static Session load(const std::filesystem::path& path, const LoadOptions& options = {});
    Session(Session&&) noexcept;
    Session& operator=(Session&&) noexcept;
    // Generations that have not ended report an error.
    ~Session();

    // Queue a request. tokenizer: for text and stop strings; null: token ids only. It may be
    // destroyed before the generation. Throws QueueFull if max_batch_size + max_queue requests have
    // not ended, and Error if the request is wrong or the session is closed.
    Generation submit(Request request, const Tokenizer* tokenizer = nullptr);
    // Run one step, such as a pass, for all requests; first wait while another thread runs one.
    // Returns whether there is more to do. Throws Error if the session is closed.
    bool step();
    // Do now what the first requests would wait for: time passes for `auto`, and on TensorRT
    // engines capture CUDA graphs. samplings: those of the requests; empty: greedy and sampling.
    // Does little while requests run. Throws Error if the session is closed, a pass fails or the
    // device is lost.
    void warm_up(const std::vector<SamplingParams>& samplings = {});
    // The graph files or passes that could not be captured as CUDA graphs, each with the reason.
    // Throws Error if the session is closed.
    std::map<std::string, std::string> uncaptured() const;
    // Cancel all requests and free the memory.
    void close();

    const Bundle& bundle() const;
    // "cpu", "cuda", or the name and version of the engines' library.
    std::string device() const;

    explicit Session(std::shared_ptr<Core> core);  // for the library's own tests

   private:
    std::shared_ptr<Core> core_;
};

}  // namespace pass
