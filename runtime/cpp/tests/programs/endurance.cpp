// For tests/cpp: endurance BUNDLE runs the same 200 requests of every kind ten times on one
// session, some of them cancelled or dropped unread. It writes the memory in use after each time,
// and after the session is closed, as JSON. They are the same each time because others could open
// another tail, or make ONNX Runtime's arena grow.

#include <malloc.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <pass/pass.hpp>
#include <random>

namespace {

constexpr int num_repeats = 10, num_batches = 10, batch_size = 20;

// The heap; counts the session's blocks and bytes.
class Counting : public pass::Allocator {
   public:
    void* allocate(std::size_t size) noexcept override {
        void* block = std::malloc(size);
        if (block == nullptr) return nullptr;
        sizes_[block] = size;
        bytes += size;
        return block;
    }
    void free(void* block) noexcept override {
        bytes -= sizes_.at(block);
        sizes_.erase(block);
        std::free(block);
    }
    std::size_t blocks() const { return sizes_.size(); }
    std::size_t bytes = 0;

   private:
    std::map<void*, std::size_t> sizes_;
};

class Chance {
   public:
    int below(int end) { return std::uniform_int_distribution<int>(0, end - 1)(random_); }

    pass::Request request(std::int64_t vocab) {
        static const char* const plans[] = {"ar", "two-pass", "fused", "fused:2,1,1", "auto"};
        static const char* const drafts[] = {"lookahead", "ngram", "both"};
        pass::Request sent;
        const int length = below(33) == 0 ? 200 : 1 + below(40);
        const int period = 1 + below(12);  // so that n-grams match
        std::vector<std::int64_t> cycle;
        for (int i = 0; i < period; ++i) cycle.push_back(2 + below(static_cast<int>(vocab) - 2));
        for (int i = 0; i < length; ++i)
            sent.prompt_ids.push_back(cycle[static_cast<std::size_t>(i % period)]);
        pass::GenerateOptions& options = sent.options;
        options.max_new_tokens = 1 + below(8);
        options.plan = plans[below(5)];
        // Few shapes, because which plans `auto` chooses depends on the clock.
        if (options.plan == "auto") options.lookahead = 1;
        if (options.plan != "ar" && below(2) == 0) options.draft = drafts[below(3)];
        options.sampling.seed = static_cast<std::uint64_t>(below(1 << 30));
        options.sampling.temperature = below(3) == 0 ? 0.0 : 0.9;
        if (below(3) == 0) options.sampling.top_k = 20;
        if (below(4) == 0) options.stop_token_ids = {2 + below(100), 3 + below(100)};
        if (below(4) == 0) options.logprobs = below(4);
        options.reuse_prefix = below(5) == 0;
        return sent;
    }

   private:
    std::mt19937 random_{1};
};

nlohmann::json memory_now(const Counting& counting) {
    std::ifstream file("/proc/self/statm");
    std::size_t pages = 0, resident = 0;
    file >> pages >> resident;
    const struct mallinfo2 heap = mallinfo2();
    return {{"resident", resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE))},
            {"heap", heap.uordblks + heap.hblkhd},
            {"bytes", counting.bytes},
            {"blocks", counting.blocks()}};
}

// Runs some requests at once, of which the second is cancelled and the third dropped.
void answer(pass::Session& session, Chance& chance, std::map<std::string, int>& ends) {
    std::vector<pass::Generation> running;
    for (int i = 0; i < batch_size; ++i)
        running.push_back(session.submit(chance.request(session.bundle().vocab_size())));
    for (int steps = chance.below(6); steps > 0; --steps) session.step();
    running[1].cancel();
    running.erase(running.begin() + 2);
    for (pass::Generation& generation : running) {
        generation.run();
        ends[pass::name_of(*generation.finish_reason())] += 1;
    }
    while (session.step()) {
    }
}

void endure(const char* bundle, const std::shared_ptr<Counting>& counting) {
    pass::LoadOptions options;
    options.device = "cpu";
    options.threads = 1;
    options.max_batch_size = 4;
    options.allocator = counting;
    pass::Session session = pass::Session::load(bundle, options);
    std::map<std::string, int> ends;
    for (int time = 0; time < num_repeats; ++time) {
        Chance chance;
        for (int number = 0; number < num_batches; ++number) answer(session, chance, ends);
        pass::Request last{{5, 6, 7}, {}};  // resizes the cache to the same size every time
        last.options.plan = "ar";
        session.submit(last).run();
        std::cout << memory_now(*counting) << std::endl;
    }
    std::cout << nlohmann::json{{"ends", ends}} << std::endl;
}

}  // namespace

int main(int, char** arguments) {
    const auto counting = std::make_shared<Counting>();
    endure(arguments[1], counting);
    std::cout << memory_now(*counting) << std::endl;
}
