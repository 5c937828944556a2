#include "api/c_api.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>

namespace {

void write_error(char* error, std::size_t size, const char* message) {
    if (error == nullptr || size == 0) return;
    const std::size_t length = std::min(size - 1, std::strlen(message));
    std::memcpy(error, message, length);
    error[length] = '\0';
}

// If `call` throws, writes the message to `error`, and returns `failed`.
template <class Call, class Result>
Result guarded(char* error, std::size_t size, Result failed, const Call& call) {
    try {
        return call();
    } catch (const std::bad_alloc&) {
        write_error(error, size, "there is no memory");
    } catch (const std::exception& problem) {
        write_error(error, size, problem.what());
    } catch (...) {
        write_error(error, size, "an unknown exception was thrown");
    }
    return failed;
}

void require(bool holds, const std::string& message) {
    if (!holds) throw pass::Error(message);
}

std::vector<std::int64_t> ids_at(const std::int64_t* ids, std::size_t count, const char* name) {
    require(count == 0 || ids != nullptr, std::string(name) + " is null");
    return {ids, ids + count};
}

// With defaults for the fields that the caller's older struct lacks. min_size: the struct's bytes
// in version 0.1; a smaller size was never set.
template <class Options>
Options completed(const Options* given, void (*init)(Options*, std::size_t), std::size_t min_size) {
    Options options;
    init(&options, sizeof options);
    if (given == nullptr) return options;
    require(given->size >= min_size,
            "the options have no size: begin with pass_default_load_options or "
            "pass_default_generate_options");
    std::memcpy(&options, given, std::min(given->size, sizeof options));
    return options;
}

// The part that the caller's version of the struct has.
template <class Struct>
void copy_out(const Struct& full, Struct* target, std::size_t size) {
    if (target != nullptr) std::memcpy(target, &full, std::min(size, sizeof full));
}

// In version 0.1, up to what was the last field then.
constexpr std::size_t min_load_options_size = offsetof(pass_load_options, text) + sizeof(int);
constexpr std::size_t min_generate_options_size =
    offsetof(pass_generate_options, logprobs) + sizeof(int);

pass::LoadOptions options_of(const pass_load_options& given) {
    pass::LoadOptions options;
    if (given.device != nullptr) options.device = given.device;
    if (given.onnxruntime != nullptr) options.onnxruntime = given.onnxruntime;
    options.threads = given.threads;
    options.max_batch_size = given.max_batch_size;
    options.max_queue = static_cast<std::size_t>(std::max<std::int64_t>(given.max_queue, 0));
    if (given.capacity != 0) options.capacity = given.capacity;
    options.verify = given.verify != 0;
    if (given.speculative_max_concurrency >= 0)
        options.speculative_max_concurrency = given.speculative_max_concurrency;
    options.prefix_cache = given.prefix_cache != 0;
    return options;
}

// Biases, and the limits on which tokens are drawn.
void read_processors(const pass_generate_options& given, pass::GenerateOptions& options) {
    options.min_tokens = given.min_tokens;
    require(given.bias_count == 0 || (given.bias_token_ids != nullptr && given.biases != nullptr),
            "biases is null");
    for (std::size_t i = 0; i < given.bias_count; ++i)
        options.sampling.logit_bias[given.bias_token_ids[i]] = given.biases[i];
    options.allowed_token_ids =
        ids_at(given.allowed_token_ids, given.allowed_token_count, "allowed_token_ids");
    require(given.bad_word_count == 0 ||
                (given.bad_words != nullptr && given.bad_word_lengths != nullptr),
            "bad_words is null");
    for (std::size_t i = 0; i < given.bad_word_count; ++i)
        options.bad_words.push_back(
            ids_at(given.bad_words[i], given.bad_word_lengths[i], "a bad word"));
    if (given.allowed_tokens == nullptr) return;
    options.allowed_tokens = [call = given.allowed_tokens, user = given.allowed_tokens_user](
                                 std::span<const std::int64_t> text,
                                 std::span<std::uint32_t> allowed) {
        require(call(user, text.data(), text.size(), allowed.data(), allowed.size()) == 0,
                "allowed_tokens reported an error");
    };
}

pass::GenerateOptions options_of(const pass_generate_options& given) {
    pass::GenerateOptions options;
    options.max_new_tokens = given.max_new_tokens;
#define READ(type, name, ...) options.sampling.name = given.name;
    PASS_SAMPLING_FIELDS(READ)
#undef READ
    if (given.has_seed != 0) options.sampling.seed = given.seed;
    if (given.plan != nullptr) options.plan = given.plan;
    if (given.draft != nullptr) options.draft = given.draft;
    if (given.lookahead >= 0) options.lookahead = given.lookahead;
    options.ignore_eos = given.ignore_eos != 0;
    if (given.logprobs >= 0) options.logprobs = given.logprobs;
    if (given.cache_salt != nullptr) options.cache_salt = given.cache_salt;
    options.reuse_prefix = given.reuse_prefix != 0;
    require(given.stop_count == 0 || given.stop != nullptr, "stop is null");
    for (std::size_t i = 0; i < given.stop_count; ++i) {
        require(given.stop[i] != nullptr, "a stop string is null");
        options.stop.emplace_back(given.stop[i]);
    }
    options.stop_token_ids = ids_at(given.stop_token_ids, given.stop_token_count, "stop_token_ids");
    read_processors(given, options);
    return options;
}

// Returns how many tokens it wrote; 0 if `read` (`next` or `poll`) returns no event.
int read_tokens(pass_generation* generation, std::int64_t* tokens, std::size_t room,
                std::optional<pass::Event> (pass::Generation::*read)()) {
    require(generation != nullptr, "the generation is null");
    require(tokens != nullptr && room > 0,
            "there is no room for tokens: give an array of at least one");
    std::deque<pass::Token>& unread = generation->unread;
    generation->returned.clear();
    while (unread.empty()) {
        const std::optional<pass::Event> event = (generation->generation.*read)();
        if (!event) return 0;
        unread.insert(unread.end(), event->tokens.begin(), event->tokens.end());
    }
    const auto count = static_cast<std::ptrdiff_t>(std::min(room, unread.size()));
    generation->returned.assign(unread.begin(), unread.begin() + count);
    unread.erase(unread.begin(), unread.begin() + count);
    for (std::ptrdiff_t i = 0; i < count; ++i)
        tokens[i] = generation->returned[static_cast<std::size_t>(i)].id;
    return static_cast<int>(count);
}

}  // namespace

const char* pass_version(void) { return PASS_VERSION; }

void pass_set_log(pass_log_callback callback, void* user, int level) {
    guarded(nullptr, 0, 0, [&] {
        pass::LogFunction log;
        if (callback != nullptr) {
            log = [=](pass::LogLevel severity, const std::string& message) {
                callback(user, static_cast<int>(severity), message.c_str());
            };
        }
        pass::set_log(std::move(log),
                      static_cast<pass::LogLevel>(std::clamp<int>(level, 0, PASS_LOG_ERROR)));
        return 0;
    });
}

void pass_init_load_options(pass_load_options* options, size_t size) {
    pass_load_options defaults{};
    defaults.size = std::min(size, sizeof defaults);
    defaults.device = "auto";
    defaults.max_batch_size = 1;
    defaults.max_queue = 1024;
    defaults.verify = defaults.prefix_cache = 1;
    defaults.speculative_max_concurrency = -1;
    copy_out(defaults, options, size);
}

void pass_init_generate_options(pass_generate_options* options, size_t size) {
    pass_generate_options defaults{};
    defaults.size = std::min(size, sizeof defaults);
    defaults.max_new_tokens = 128;
#define SET(type, name, value, ...) defaults.name = value;
    PASS_SAMPLING_FIELDS(SET)
#undef SET
    defaults.plan = "auto";
    defaults.lookahead = defaults.logprobs = -1;
    copy_out(defaults, options, size);
}

pass_session* pass_open(const char* bundle, const pass_load_options* options, char* error,
                        size_t error_size) {
    return guarded(error, error_size, static_cast<pass_session*>(nullptr), [&] {
        require(bundle != nullptr, "the bundle's path is null");
        const pass_load_options given =
            completed(options, pass_init_load_options, min_load_options_size);
        const pass::LoadOptions load_options = options_of(given);
        std::optional<pass::Tokenizer> tokenizer;
        if (given.text != 0) tokenizer.emplace(bundle, "", load_options.onnxruntime);
        return new pass_session{pass::Session::load(bundle, load_options), std::move(tokenizer)};
    });
}

void pass_close(pass_session* session) { delete session; }

int pass_warm_up(pass_session* session, char* error, size_t error_size) {
    return guarded(error, error_size, -1, [&] {
        require(session != nullptr, "the session is null");
        session->session.warm_up();
        return 0;
    });
}

int64_t pass_encode(pass_session* session, const char* text, int64_t* ids, size_t room, char* error,
                    size_t error_size) {
    return guarded(error, error_size, std::int64_t{-1}, [&] {
        require(session != nullptr, "the session is null");
        require(text != nullptr && (ids != nullptr || room == 0), "text or ids is null");
        require(session->tokenizer.has_value(),
                "the session has no tokenizer: open it with the option text");
        const std::vector<std::int64_t> encoded = session->tokenizer->encode(text);
        std::copy_n(encoded.begin(), std::min(room, encoded.size()), ids);
        return static_cast<std::int64_t>(encoded.size());
    });
}

pass_generation* pass_submit(pass_session* session, const int64_t* prompt_ids, size_t count,
                             const pass_generate_options* options, char* error, size_t error_size) {
    return guarded(error, error_size, static_cast<pass_generation*>(nullptr), [&] {
        require(session != nullptr, "the session is null");
        pass::Request request{
            ids_at(prompt_ids, count, "prompt_ids"),
            options_of(completed(options, pass_init_generate_options, min_generate_options_size))};
        const pass::Tokenizer* tokenizer = session->tokenizer ? &*session->tokenizer : nullptr;
        require(
            tokenizer != nullptr || request.options.stop.empty(),
            "stop strings need text: open the session with the option text, or use stop_token_ids");
        return new pass_generation{session->session.submit(std::move(request), tokenizer), {}, {}};
    });
}

int pass_step(pass_session* session, char* error, size_t error_size) {
    return guarded(error, error_size, -1, [&] {
        require(session != nullptr, "the session is null");
        return session->session.step() ? 1 : 0;
    });
}

int pass_next(pass_generation* generation, int64_t* tokens, size_t room, char* error,
              size_t error_size) {
    return guarded(error, error_size, -1,
                   [&] { return read_tokens(generation, tokens, room, &pass::Generation::next); });
}

int pass_poll(pass_generation* generation, int64_t* tokens, size_t room, char* error,
              size_t error_size) {
    return guarded(error, error_size, -1,
                   [&] { return read_tokens(generation, tokens, room, &pass::Generation::poll); });
}

const char* pass_text(const pass_generation* generation, size_t* length) {
    if (length != nullptr)
        *length = generation == nullptr ? 0 : generation->generation.text().size();
    return generation == nullptr ? "" : generation->generation.text().c_str();
}

int pass_token_logprobs(const pass_generation* generation, size_t index, float* logprob,
                        int64_t* top_ids, float* top_logprobs, size_t room) {
    if (generation == nullptr || index >= generation->returned.size()) return -1;
    const std::optional<pass::TokenLogprobs>& logprobs = generation->returned[index].logprobs;
    if (!logprobs) return -1;
    if (logprob != nullptr) *logprob = logprobs->logprob;
    const std::size_t count = std::min(room, logprobs->top.size());
    for (std::size_t i = 0; i < count; ++i) {
        if (top_ids != nullptr) top_ids[i] = logprobs->top[i].first;
        if (top_logprobs != nullptr) top_logprobs[i] = logprobs->top[i].second;
    }
    return static_cast<int>(count);
}

void pass_cancel(pass_generation* generation) {
    if (generation != nullptr) generation->generation.cancel();
}

const char* pass_finish_reason(const pass_generation* generation) {
    if (generation == nullptr) return nullptr;
    const std::optional<pass::FinishReason> reason = generation->generation.finish_reason();
    return reason ? pass::name_of(*reason) : nullptr;
}

void pass_read_stats(const pass_generation* generation, pass_stats* stats, size_t size) {
    copy_out({}, stats, size);
    if (generation == nullptr) return;
    guarded(nullptr, 0, 0, [&] {
        const pass::Stats counts = generation->generation.stats();
        copy_out({counts.prompt_tokens, counts.cached_tokens, counts.generated_tokens,
                  counts.passes, counts.steps, counts.drafted, counts.accepted,
                  counts.prefill_seconds, counts.decode_seconds},
                 stats, size);
        return 0;
    });
}

void pass_free(pass_generation* generation) { delete generation; }
