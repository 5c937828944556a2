// For tests/cpp: runs the same 200 requests of every kind ten times on one session. After each
// time, and after the session is closed, it writes the memory in use; before the last line, how the
// requests ended. (New requests each time could open another tail, or make an arena grow.)

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

class CountingAllocator : public pass::Allocator {
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

class RandomRequests {
   public:
    int below(int end) { return std::uniform_int_distribution<int>(0, end - 1)(random_); }

    pass::Request next(std::int64_t vocab_size) {
        static const char* const plans[] = {"ar", "two-pass", "fused", "fused:2,1,1", "auto"};
        static const char* const drafts[] = {"lookahead", "ngram", "both"};
        pass::Request request;
        const int prompt_length = below(33) == 0 ? 200 : 1 + below(40);
        const int period = 1 + below(12);  // prompts repeat themselves, so that n-grams match
        std::vector<std::int64_t> repeated;
        for (int i = 0; i < period; ++i)
            repeated.push_back(2 + below(static_cast<int>(vocab_size) - 2));
        for (int i = 0; i < prompt_length; ++i)
            request.prompt_ids.push_back(repeated[static_cast<std::size_t>(i % period)]);
        pass::GenerateOptions& options = request.options;
        options.max_new_tokens = 1 + below(8);
        options.plan = plans[below(5)];
        // Which plans `auto` chooses depends on the clock, so it may choose from few.
        if (options.plan == "auto") options.lookahead = 1;
        if (options.plan != "ar" && below(2) == 0) options.draft = drafts[below(3)];
        options.sampling.seed = static_cast<std::uint64_t>(below(1 << 30));
        options.sampling.temperature = below(3) == 0 ? 0.0 : 0.9;
        if (below(3) == 0) options.sampling.top_k = 20;
        if (below(4) == 0) options.stop_token_ids = {2 + below(100), 3 + below(100)};
        if (below(4) == 0) options.logprobs = below(4);
        options.reuse_prefix = below(5) == 0;
        return request;
    }

   private:
    std::mt19937 random_{1};
};

nlohmann::json memory_now(const CountingAllocator& allocator) {
    std::ifstream file("/proc/self/statm");
    std::size_t pages = 0, resident = 0;
    file >> pages >> resident;
    const struct mallinfo2 heap = mallinfo2();
    return {{"resident", resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE))},
            {"heap", heap.uordblks + heap.hblkhd},
            {"bytes", allocator.bytes},
            {"blocks", allocator.blocks()}};
}

// The second request is cancelled and the third dropped.
void run_batch(pass::Session& session, RandomRequests& requests, std::map<std::string, int>& ends) {
    std::vector<pass::Generation> running;
    for (int i = 0; i < batch_size; ++i)
        running.push_back(session.submit(requests.next(session.bundle().vocab_size())));
    for (int steps = requests.below(6); steps > 0; --steps) session.step();
    running[1].cancel();
    running.erase(running.begin() + 2);
    for (pass::Generation& generation : running) {
        generation.run();
        ends[pass::name_of(*generation.finish_reason())] += 1;
    }
    while (session.step()) {
    }
}

void endure(const char* bundle, const std::shared_ptr<CountingAllocator>& allocator) {
    pass::LoadOptions options;
    options.device = "cpu";
    options.threads = 1;
    options.max_batch_size = 4;
    options.allocator = allocator;
    pass::Session session = pass::Session::load(bundle, options);
    std::map<std::string, int> ends;
    for (int repeat = 0; repeat < num_repeats; ++repeat) {
        RandomRequests requests;
        for (int batch = 0; batch < num_batches; ++batch) run_batch(session, requests, ends);
        pass::Request last{{5, 6, 7}, {}};  // resizes the cache to the same size every time
        last.options.plan = "ar";
        session.submit(last).run();
        std::cout << memory_now(*allocator) << std::endl;
    }
    std::cout << nlohmann::json{{"ends", ends}} << std::endl;
}

}  // namespace

int main(int, char** arguments) {
    const auto allocator = std::make_shared<CountingAllocator>();
    endure(arguments[1], allocator);
    std::cout << memory_now(*allocator) << std::endl;
}
