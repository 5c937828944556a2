// A bundle, a session over it, and generations under way.
//
// A session has no thread of its own: whoever waits for a token, or calls `step`, decodes for everybody. Any thread may
// call any method of a session; a generation is for one reader, but `cancel` is for any thread.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pass/error.hpp"
#include "pass/event.hpp"
#include "pass/export.h"
#include "pass/options.hpp"
#include "pass/stats.hpp"

namespace pass {

struct Manifest;
class Core;
class Sequence;
class Tokenizer;

// A directory that pass-export wrote: its manifest was checked, and its files are there. Move-only.
class PASS_API Bundle {
   public:
    // verify: compare the hashes of all files. Throws Error where something is wrong.
    explicit Bundle(const std::filesystem::path& path, bool verify = true);
    Bundle(Bundle&&) noexcept;
    Bundle& operator=(Bundle&&) noexcept;
    ~Bundle();

    const std::filesystem::path& path() const;
    const std::string& name() const;
    std::int64_t vocab_size() const;
    std::int64_t max_capacity() const;  // the longest sequence in tokens
    int lookahead() const;              // the most drafts of a pass
    const std::string& rule() const;    // "match" or "rejection"
    const std::string& dtype() const;
    const std::string& weights() const;
    const std::string& lookahead_source() const;
    const std::vector<std::int64_t>& eos_token_ids() const;
    std::optional<std::int64_t> bos_token_id() const;

    struct Data;
    explicit Bundle(std::unique_ptr<Data> data);  // for the library's own tests

   private:
    friend class Session;
    std::unique_ptr<Data> data_;
};

struct Request {
    std::vector<std::int64_t> prompt_ids;
    GenerateOptions options;
};

// A request under way, to be read by one reader. Destroying it cancels it. Move-only.
class PASS_API Generation {
   public:
    Generation(Generation&&) noexcept;
    Generation& operator=(Generation&&) noexcept;
    ~Generation();

    // The tokens of the next pass; none at the end. Decodes where nobody else does. Throws what failed.
    std::optional<Event> next();
    // Wait for the end. Throws what failed.
    void run();
    // End it as soon as the pass in progress is done; what was written until then can still be read. For any thread.
    void cancel();

    // What was read so far.
    const std::vector<Token>& tokens() const;
    std::vector<std::int64_t> token_ids() const;
    const std::string& text() const;
    // None before the end.
    std::optional<FinishReason> finish_reason() const;
    StopReason stop_reason() const;
    const std::vector<std::int64_t>& prompt_ids() const;
    // What sampling was seeded with: with it the text can be had again.
    std::uint64_t seed() const;
    bool logprobs() const;
    Stats stats() const;

   private:
    friend class Session;
    struct Data;
    explicit Generation(std::unique_ptr<Data> data);
    std::unique_ptr<Data> data_;
};

// One model, and as many sequences at a time as it has slots. Move-only.
class PASS_API Session {
   public:
    // Takes the bundle. Throws Error where the device, a graph or memory is missing.
    explicit Session(Bundle bundle, const LoadOptions& options = {});
    // The same from a path; `options.verify` says whether hashes are compared.
    static Session load(const std::filesystem::path& path, const LoadOptions& options = {});
    Session(Session&&) noexcept;
    Session& operator=(Session&&) noexcept;
    ~Session();  // closes it

    // Begin to write behind the prompt, or wait in the queue for a free slot. Throws QueueFull where too many wait.
    // tokenizer: for text and stop strings, null where token ids are enough; it may go before the generation.
    Generation submit(Request request, const Tokenizer* tokenizer = nullptr);
    // One round for everybody. False where there is nothing more to do.
    bool step();
    // Cancel what is under way and give memory back; the session cannot be used afterwards.
    void close();
    // How a request is called in statistics, and by how many drafts at most. Throws Error where it cannot be.
    std::pair<std::string, int> mode(const GenerateOptions& options) const;

    const Bundle& bundle() const;
    // "cpu", "cuda", "tensorrt-rtx-ep", or the library of an engine set and its version.
    std::string device() const;

    explicit Session(std::shared_ptr<Core> core);  // for the library's own tests

   private:
    std::shared_ptr<Core> core_;
};

}  // namespace pass
