#include "catch.hpp"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "decode/engine.h"
#include "remembering.h"

using namespace pass;
using namespace pass::test;

namespace {

class RefusingAllocator : public Allocator {
   public:
    void* allocate(std::size_t size) noexcept override {
        if (size != refused) return std::malloc(size);
        ++refusals;
        return nullptr;
    }
    void free(void* block) noexcept override { std::free(block); }
    std::size_t refused = 0;
    int refusals = 0;
};

// After every step, the K/V of all slots are checked.
struct Machine {
    explicit Machine(int slots, bool prefix_cache = true, bool same_entries = true)
        : backend(slots, heap, same_entries), engine(backend, prefix_cache) {}

    std::shared_ptr<SequenceState> submit(const Tokens& prompt, std::int64_t tokens = 3,
                                          const std::string& plan = "ar", bool reuse_prefix = false,
                                          const std::string& salt = "") {
        ResolvedRequest request;
        request.prompt_ids = prompt;
        request.max_new_tokens = tokens;
        request.plan = make_plan(plan, 4);
        request.lookahead_drafts = request.plan->drafts();
        request.reuse_prefix = reuse_prefix;
        request.cache_salt = salt;
        auto sequence = std::make_shared<SequenceState>(std::move(request), nullptr,
                                                        std::make_shared<Signals>());
        engine.add(sequence);
        return sequence;
    }
    bool step() {
        const bool sequences_left = engine.step();
        for (const Slot& slot : engine.slots().all()) {
            CHECK(backend.holds(slot.number, slot.held()));
            if (slot.sequence == nullptr) continue;
            CHECK(slot.salt == slot.sequence->request.cache_salt);
            CHECK((slot.staged || slot.num_drafts == 0));
        }
        return sequences_left;
    }
    std::int64_t run_and_count_reused(const std::shared_ptr<SequenceState>& sequence) {
        while (step()) {
        }
        REQUIRE(sequence->output.end.has_value());
        CHECK(sequence->output.end->reason == FinishReason::length);
        return sequence->stats.cached_tokens;
    }

    std::shared_ptr<RefusingAllocator> heap = std::make_shared<RefusingAllocator>();
    RememberingBackend backend;
    Engine engine;
};

Tokens text(std::int64_t kind, std::size_t length, const Tokens& end = {}) {
    Tokens tokens;
    for (std::size_t i = 0; i < length; ++i)
        tokens.push_back((kind + 7 * static_cast<std::int64_t>(i * i)) % 41);
    tokens.insert(tokens.end(), end.begin(), end.end());
    return tokens;
}

}  // namespace

TEST_CASE("a common beginning of prompts is prefilled once, also in a conversation", "[prefix]") {
    for (const std::string plan : {"ar", "two-pass", "fused"}) {
        INFO(plan);
        Machine machine(2);
        CHECK(machine.run_and_count_reused(machine.submit(text(0, 100, {5}), 4, plan)) == 0);
        const auto second = machine.submit(text(0, 100, {6, 7}), 4, plan);
        CHECK(machine.run_and_count_reused(second) == 96);  // the whole blocks of 100 tokens
        Tokens conversation = second->tokens;
        conversation.push_back(9);
        CHECK(machine.run_and_count_reused(machine.submit(conversation, 4, plan)) == 96);
        const auto first = machine.submit(text(1, 48, {3}), 4, plan),
                   at_once = machine.submit(text(1, 48, {4}), 4, plan);
        CHECK(machine.run_and_count_reused(first) + machine.run_and_count_reused(at_once) == 48);
    }
}

TEST_CASE("a prompt that all requests of a batch have is prefilled once", "[prefix]") {
    for (const int slots : {1, 2, 4, 8}) {
        // While another request decodes, the prompt is prefilled in several steps.
        for (const bool busy : {false, true}) {
            INFO(slots << " " << busy);
            Machine machine(slots);
            if (busy) machine.submit({1, 2, 3}, 60);
            machine.step();
            machine.backend.num_prefilled = 0;
            std::vector<std::shared_ptr<SequenceState>> sequences;
            for (const char* plan : {"ar", "fused", "two-pass", "ar", "fused"})
                sequences.push_back(machine.submit(text(2, 110), 12, plan));
            std::vector<std::int64_t> reused;
            for (const auto& sequence : sequences)
                reused.push_back(machine.run_and_count_reused(sequence));
            std::sort(reused.begin(), reused.end());
            CHECK(reused == Tokens{0, 96, 96, 96, 96});
            CHECK(machine.backend.num_prefilled == 109 + 4 * (109 - 96));
        }
    }
}

TEST_CASE("if the request that prefills a common prompt ends, another goes on", "[prefix]") {
    for (const bool fails : {false, true}) {
        Machine machine(4);
        machine.submit({1, 2, 3}, 60);
        machine.step();
        machine.backend.num_prefilled = 0;
        const auto first = machine.submit(text(2, 110));
        const auto second = machine.submit(text(2, 110)), third = machine.submit(text(2, 110));
        machine.step();
        CHECK(machine.backend.num_prefilled == 64);
        first->cancelled = !fails;
        machine.backend.before_chunk = [&, left = fails]() mutable {  // only the first chunk fails
            if (std::exchange(left, false)) throw Error("the chunk failed");
        };
        CHECK(machine.run_and_count_reused(second) == 64);
        CHECK(machine.run_and_count_reused(third) == 96);
        CHECK(first->output.end->reason == (fails ? FinishReason::error : FinishReason::cancelled));
        CHECK(machine.backend.num_prefilled == 109 + 109 - 96);
    }
}

TEST_CASE("K/V of a sequence that moved to a lower slot are shared", "[prefix]") {
    Machine machine(2);
    machine.submit({1, 2, 3}, 2);
    machine.run_and_count_reused(machine.submit(text(2, 100), 20));
    CHECK(machine.engine.slots().all()[0].held().size() == 119);
    CHECK(machine.run_and_count_reused(machine.submit(text(2, 100, {9}))) == 96);
}

TEST_CASE("the older request decides the plan, also after a move", "[prefix]") {
    // Of the requests in slots 0, 1 and 2, the first one ends, and the third moves to its slot.
    Machine machine(4);
    machine.submit({1, 2, 3}, 4);
    const auto older = machine.submit({4, 5, 6}, 40, "two-pass"),
               younger = machine.submit({7, 8, 9}, 40, "fused");
    while (machine.engine.slots().all()[0].sequence != younger) REQUIRE(machine.step());
    for (int i = 0; i < 4; ++i) {
        REQUIRE(machine.step());
        REQUIRE(!older->finished);
        const std::optional<Window>& window = machine.engine.staged_window();
        CHECK((window.has_value() && older->request.plan->contains(*window)));
    }
}

TEST_CASE("a long prompt is kept while short requests take its slot", "[prefix]") {
    for (const int slots : {1, 3}) {  // short requests also shrink the cache
        INFO(slots);
        Machine machine(slots);
        CHECK(machine.run_and_count_reused(machine.submit(text(3, 200, {5}))) == 0);
        for (std::int64_t number = 0; number < 4; ++number) {
            machine.run_and_count_reused(machine.submit(text(3, 3, {7, number})));
            machine.run_and_count_reused(machine.submit({6, number, 8}));
        }
        CHECK(machine.run_and_count_reused(machine.submit(text(3, 200, {9, 9}))) == 192);
        Tokens conversation = text(3, 200, {11});
        for (std::int64_t turn = 0; turn < 3; ++turn) {
            const auto length = static_cast<std::int64_t>(conversation.size());
            conversation.push_back(turn);
            CHECK(machine.run_and_count_reused(machine.submit(conversation)) ==
                  rounded_to_blocks(length - 1));
            machine.run_and_count_reused(machine.submit({12, 13}));
        }
    }
}

TEST_CASE("without memory to keep a prompt, it is prefilled again", "[prefix]") {
    Machine machine(1);
    const auto first = machine.submit(text(3, 200, {5}));
    CHECK(machine.run_and_count_reused(first) == 0);
    // The size of a copy of all 203 tokens in the slot, and 64 bytes to align it.
    machine.heap->refused = machine.backend.cache().saved_bytes(203) + 64;
    CHECK(machine.run_and_count_reused(machine.submit({6, 7, 8})) == 0);
    CHECK(machine.heap->refusals == 1);
    CHECK(machine.run_and_count_reused(machine.submit(text(3, 200, {5}))) == 0);
    CHECK(machine.heap->refusals == 1);
}

TEST_CASE("without a prefix cache only requests with reuse_prefix reuse K/V", "[prefix]") {
    for (const auto& [prefix_cache, same_entries] : {std::pair(true, false), {false, true}}) {
        Machine machine(2, prefix_cache, same_entries);
        CHECK(machine.run_and_count_reused(machine.submit(text(0, 100, {5}))) == 0);
        CHECK(machine.run_and_count_reused(machine.submit(text(0, 100, {6}))) == 0);
        const auto first = machine.submit(text(1, 50)), second = machine.submit(text(1, 50));
        CHECK(machine.run_and_count_reused(first) + machine.run_and_count_reused(second) == 0);
        CHECK(machine.run_and_count_reused(machine.submit(text(1, 50, {9}), 3, "ar", true)) == 48);
    }
}

TEST_CASE("K/V are shared among requests of one salt only", "[prefix]") {
    for (const int slots : {1, 2}) {
        Machine machine(slots);
        const auto reused = [&](std::int64_t last, const std::string& salt) {
            return machine.run_and_count_reused(
                machine.submit(text(0, 100, {last}), 3, "ar", false, salt));
        };
        for (const char* salt : {"a", "b", ""}) CHECK(reused(5, salt) == 0);
        // Three salts in one or two slots: saved copies are used, too.
        for (const char* salt : {"a", "b", ""}) CHECK(reused(6, salt) == 96);
        const auto first = machine.submit(text(1, 80), 3, "ar", false, "a"),
                   at_once = machine.submit(text(1, 80), 3);
        CHECK(machine.run_and_count_reused(first) + machine.run_and_count_reused(at_once) == 0);
    }
    Machine machine(1, false);  // without a prefix cache, so by `reuse_prefix` alone
    std::vector<std::int64_t> reused;
    for (const char* salt : {"a", "b", "b", "a"})
        reused.push_back(
            machine.run_and_count_reused(machine.submit(text(0, 100, {5}), 3, "ar", true, salt)));
    CHECK(reused == Tokens{0, 0, 96, 0});
}

TEST_CASE("the copies used least recently are dropped to keep the budget", "[prefix]") {
    RememberingBackend backend(2);
    backend.resize(256, Tokens{0, 0});
    PrefixStore store(backend.cache(), backend.memory(), backend.cache().saved_bytes(400));
    const auto stored = [&](const Tokens& tokens) { return store.match(tokens, "").count; };
    const Tokens first(150, 1), second(150, 2), third(150, 3);
    store.save(0, first, "");
    store.save(0, second, "");
    store.load({store.match(first, "").index, 10}, 1);  // uses the first copy
    store.save(0, third, "");
    CHECK(Tokens{stored(first), stored(second), stored(third)} == Tokens{150, 0, 150});
    store.save(0, std::span(first).first(100), "");  // a copy begins with these tokens
    CHECK(store.used() == backend.cache().saved_bytes(150 + 150));
    Tokens longer = first;
    longer.push_back(4);
    store.save(0, longer, "");  // replaces the copy of its first 150 tokens
    CHECK(store.used() == backend.cache().saved_bytes(150 + 151));
    store.save(0, Tokens(PrefixStore::min_saved_tokens - 1, 5), "");
    store.save(0, Tokens(401, 6), "");
    CHECK(stored({5}) + stored({6}) == 0);  // one is too short, the other exceeds the budget

    PrefixStore many(backend.cache(), backend.memory());
    for (std::int64_t number = 0;
         number < 2 * static_cast<std::int64_t>(PrefixStore::max_saved_prefixes); ++number) {
        many.save(0, Tokens(PrefixStore::min_saved_tokens, number), "");
    }
    const std::size_t saved_tokens =
        PrefixStore::max_saved_prefixes * PrefixStore::min_saved_tokens;
    CHECK(many.used() == backend.cache().saved_bytes(static_cast<std::int64_t>(saved_tokens)));
    CHECK(many.match(Tokens{0}, "").count == 0);
    CHECK(many.match(Tokens{PrefixStore::max_saved_prefixes}, "").count == 1);
}
