#include "pass/pass.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <new>

#include "pass/pass.hpp"

struct pass_session {
    pass::Session session;
};

struct pass_generation {
    pass::Generation generation;
    std::deque<std::int64_t> unread;
};

namespace {

void tell(char* error, std::size_t size, const char* message) {
    if (error == nullptr || size == 0) return;
    const std::size_t length = std::min(size - 1, std::strlen(message));
    std::memcpy(error, message, length);
    error[length] = '\0';
}

// What `call` returns; `failed` with a message where it throws: no exception may cross into C.
template <class Call, class Result>
Result guarded(char* error, std::size_t size, Result failed, const Call& call) {
    try {
        return call();
    } catch (const std::bad_alloc&) {
        tell(error, size, "there is no memory");
    } catch (const std::exception& problem) {
        tell(error, size, problem.what());
    } catch (...) {
        tell(error, size, "something that is no exception was thrown");
    }
    return failed;
}

pass::LoadOptions options_of(const pass_load_options& given) {
    pass::LoadOptions options;
    if (given.device != nullptr) options.device = given.device;
    if (given.onnxruntime != nullptr) options.onnxruntime = given.onnxruntime;
    options.threads = given.threads;
    options.max_batch_size = given.max_batch_size;
    options.max_queue = static_cast<std::size_t>(std::max<std::int64_t>(given.max_queue, 0));
    if (given.capacity != 0) options.capacity = given.capacity;
    options.verify = given.verify != 0;
    return options;
}

pass::GenerateOptions options_of(const pass_generate_options& given) {
    pass::GenerateOptions options;
    options.max_new_tokens = given.max_new_tokens;
    options.sampling = {given.temperature, given.top_k, given.top_p, given.min_p, std::nullopt};
    if (given.has_seed != 0) options.sampling.seed = given.seed;
    if (given.plan != nullptr) options.plan = given.plan;
    if (given.draft != nullptr) options.draft = given.draft;
    if (given.lookahead >= 0) options.lookahead = given.lookahead;
    options.ignore_eos = given.ignore_eos != 0;
    if (given.stop_token_count > 0) {
        options.stop_token_ids.assign(given.stop_token_ids, given.stop_token_ids + given.stop_token_count);
    }
    return options;
}

}  // namespace

pass_load_options pass_default_load_options(void) { return {"auto", nullptr, 0, 1, 1024, 0, 1}; }

pass_generate_options pass_default_generate_options(void) {
    return {128, 0.0, 0, 1.0, 0.0, 0, 0, "auto", nullptr, -1, 0, nullptr, 0};
}

pass_session* pass_open(const char* bundle, const pass_load_options* options, char* error, size_t error_size) {
    return guarded(error, error_size, static_cast<pass_session*>(nullptr), [&] {
        const pass_load_options given = options != nullptr ? *options : pass_default_load_options();
        return new pass_session{pass::Session::load(bundle, options_of(given))};
    });
}

void pass_close(pass_session* session) { delete session; }

pass_generation* pass_submit(pass_session* session, const int64_t* prompt_ids, size_t count,
                             const pass_generate_options* options, char* error, size_t error_size) {
    return guarded(error, error_size, static_cast<pass_generation*>(nullptr), [&] {
        pass::Request request;
        if (count > 0) request.prompt_ids.assign(prompt_ids, prompt_ids + count);
        request.options = options_of(options != nullptr ? *options : pass_default_generate_options());
        return new pass_generation{session->session.submit(std::move(request)), {}};
    });
}

int pass_step(pass_session* session, char* error, size_t error_size) {
    return guarded(error, error_size, -1, [&] { return session->session.step() ? 1 : 0; });
}

int pass_next(pass_generation* generation, int64_t* tokens, size_t room, char* error, size_t error_size) {
    return guarded(error, error_size, -1, [&] {
        std::deque<std::int64_t>& unread = generation->unread;
        while (unread.empty()) {
            const std::optional<pass::Event> event = generation->generation.next();
            if (!event) return 0;
            for (const pass::Token& token : event->tokens) unread.push_back(token.id);
        }
        const std::size_t count = std::min(room, unread.size());
        std::copy_n(unread.begin(), count, tokens);
        unread.erase(unread.begin(), unread.begin() + static_cast<std::ptrdiff_t>(count));
        return static_cast<int>(count);
    });
}

void pass_cancel(pass_generation* generation) { generation->generation.cancel(); }

const char* pass_finish_reason(const pass_generation* generation) {
    const std::optional<pass::FinishReason> reason = generation->generation.finish_reason();
    return reason ? pass::name_of(*reason) : nullptr;
}

pass_stats pass_get_stats(const pass_generation* generation) {
    const pass::Stats stats = generation->generation.stats();
    return {stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens, stats.passes,        stats.steps,
            stats.drafted,       stats.accepted,      stats.prefill_seconds,  stats.decode_seconds};
}

void pass_free(pass_generation* generation) { delete generation; }
