// A backend without a model: each token and draft is a function of its position.
#pragma once

#include <functional>
#include <memory>

#include "api/core.h"
#include "backends/backend.h"
#include "errors.h"

namespace pass::test {

inline constexpr std::int64_t vocab = 50;

// It repeats itself after 41 tokens.
inline std::int64_t token_at(std::int64_t position) { return position * 7 % 41; }

inline Manifest reciting_manifest(std::int64_t lookahead = 4, std::int64_t capacity = 256) {
    Manifest manifest;
    manifest.model.vocab_size = vocab;
    manifest.model.kv_heads = 1;
    manifest.model.head_dim = 2;
    manifest.model.max_capacity = capacity;
    manifest.model.dtype = "float32";
    manifest.lookahead.length = lookahead;
    manifest.rule = "match";
    manifest.trunk.inputs.push_back(
        {"past_key.0", "float32", {"batch", std::int64_t{1}, "capacity", std::int64_t{2}}});
    for (int drafts = 1; drafts <= lookahead; ++drafts)
        manifest.windows[verify_window(drafts).name];
    for (const int drafts : {8, 16}) manifest.windows[copy_window(drafts).name];
    return manifest;
}

inline Capabilities reciting_capabilities(const Manifest& manifest, int slots) {
    Capabilities result{"cpu",
                        vocab,
                        stepped_capacities(manifest.model.max_capacity),
                        {64, 16, 1},
                        batch_sizes_up_to(slots)};
    result.verifying = verifying_windows(manifest);
    return result;
}

// Two of three drafts match.
class RecitingBackend : public Backend {
   public:
    RecitingBackend(const Manifest& manifest, int slots,
                    std::shared_ptr<Allocator> allocator = nullptr)
        : Backend(manifest, reciting_capabilities(manifest, slots),
                  std::make_unique<HostMemory>(std::move(allocator))) {}

    void run_trunk(const Window&, int) override {
        if (before_pass) before_pass();
    }

    void run_tail(const PassKind& kind) override {
        const int width = kind.window.width();
        const auto lengths = buffers_.read<std::int64_t>("length", kind.batch, {});
        const auto active = buffers_.read<std::int64_t>("active", kind.batch, {});
        const auto ids = buffers_.read<std::int64_t>("input_ids", kind.batch, {width});
        for (int slot = 0; slot < kind.batch; ++slot) {
            const auto at = static_cast<std::size_t>(slot);
            buffers_.write_number("count", slot, std::int64_t{0});
            if (active[at] != 0)
                emit(kind.window, slot, lengths[at], &ids[at * static_cast<std::size_t>(width)]);
        }
    }

    std::function<void()> before_pass, before_chunk;  // called before each pass or prompt chunk

   protected:
    void run_prefill(int, const Window&) override {
        if (before_chunk) before_chunk();
    }

   private:
    static std::int64_t draft_at(std::int64_t position) {
        return position % 3 == 0 ? (token_at(position) + 1) % vocab : token_at(position);
    }

    // What a tail does for one slot.
    void emit(const Window& window, int slot, std::int64_t length, const std::int64_t* ids) {
        int accepted = 0;
        while (accepted < window.drafts && ids[1 + accepted] == token_at(length + 1 + accepted))
            ++accepted;
        std::vector<std::int64_t> emitted;
        for (int i = 0; i <= window.drafts; ++i) emitted.push_back(token_at(length + 1 + i));
        buffers_.write_row("emitted", slot, {window.max_emitted()}, emitted);
        buffers_.write_number("count", slot, std::int64_t{accepted} + 1);

        const std::int64_t next_length = length + accepted + 1;
        const int num_drafts = window.next_drafts(accepted);
        const Window next = window.next();
        std::vector<std::int64_t> next_ids{token_at(next_length)};
        for (int i = 0; i < next.drafts; ++i)  // the id `vocab` stands for no draft
            next_ids.push_back(i < num_drafts ? draft_at(next_length + 1 + i) : vocab);
        const std::vector<std::int64_t> rest = constants_of(next, vocab).lookahead_ids;
        next_ids.insert(next_ids.end(), rest.begin(), rest.end());
        buffers_.write_row("input_ids", slot, {next.width()}, next_ids);
        buffers_.write_number("length", slot, next_length);
    }
};

inline std::shared_ptr<Core> reciting_core(int slots, RecitingBackend** backend = nullptr,
                                           std::shared_ptr<Allocator> allocator = nullptr,
                                           std::size_t max_queue = 1024,
                                           std::int64_t capacity = 256, LoadOptions options = {}) {
    options.max_queue = max_queue;
    auto data = std::make_unique<Bundle::Data>(Bundle::Data{"", reciting_manifest(4, capacity)});
    auto reciting = std::make_unique<RecitingBackend>(data->manifest, slots, std::move(allocator));
    if (backend != nullptr) *backend = reciting.get();
    return std::make_shared<Core>(Bundle(std::move(data)), std::move(reciting), options);
}

inline Request request(std::size_t prompt_length, std::int64_t max_new_tokens,
                       const std::string& plan = "fused") {
    Request result;
    for (std::size_t i = 0; i < prompt_length; ++i)
        result.prompt_ids.push_back(token_at(static_cast<std::int64_t>(i)));
    result.options.max_new_tokens = max_new_tokens;
    result.options.plan = plan;
    return result;
}

inline std::vector<std::int64_t> read_all(Core& core, SequenceState& sequence) {
    std::vector<std::int64_t> ids;
    while (true) {
        core.wait(sequence);
        const std::lock_guard lock(sequence.signals->mutex);
        for (const Event& event : sequence.output.events) {
            for (const Token& token : event.tokens) ids.push_back(token.id);
        }
        sequence.output.events.clear();
        if (!sequence.output.end) continue;
        if (sequence.output.end->error != nullptr)
            std::rethrow_exception(sequence.output.end->error);
        return ids;
    }
}

inline std::vector<std::int64_t> expected(std::size_t prompt_length, std::int64_t count) {
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < count; ++i)
        ids.push_back(token_at(static_cast<std::int64_t>(prompt_length) + i));
    return ids;
}

}  // namespace pass::test
