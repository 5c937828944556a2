/* libpass for C, and for languages that can call C.
 *
 * Functions that take `error`, a buffer of `error_size` bytes or null, write one line there if they
 * fail. Option structs begin with their size, which pass_default_load_options and
 * pass_default_generate_options set, so that programs work with a newer library of the same soname.
 * Threads: as in <pass/session.hpp>. Strings are UTF-8. Fields such as `verify` are 0 or 1.
 */
#ifndef PASS_PASS_H
#define PASS_PASS_H

#include <stddef.h>
#include <stdint.h>

#include "pass/export.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pass_session pass_session;
typedef struct pass_generation pass_generation;

/* Fields without a comment are those of LoadOptions in <pass/options.hpp>. */
typedef struct pass_load_options {
    size_t size; /* sizeof(pass_load_options) */
    const char* device;
    const char* onnxruntime; /* null: empty */
    int threads;
    int max_batch_size;
    int64_t max_queue;
    int64_t capacity; /* 0: the default */
    int verify;
    int text; /* open the bundle's tokenizer, which text and stop strings need */
    int64_t speculative_max_concurrency; /* -1: no limit */
    int prefix_cache;
} pass_load_options;

/* As AllowedTokens of <pass/options.hpp>. user: `allowed_tokens_user` of the options. `text` has
 * `count` tokens, `allowed` has `words` words. Anything but 0 ends the request with an error. */
typedef int (*pass_allowed_tokens)(void* user, const int64_t* text, size_t count, uint32_t* allowed,
                                   size_t words);

/* Fields without a comment are those of GenerateOptions in <pass/options.hpp>. */
typedef struct pass_generate_options {
    size_t size; /* sizeof(pass_generate_options) */
    int64_t max_new_tokens;
    double temperature;
    int64_t top_k;
    double top_p;
    double min_p;
    int has_seed; /* 0: a random seed */
    uint64_t seed;
    const char* plan;
    const char* draft; /* null: the default */
    int lookahead;     /* -1: the default */
    int ignore_eos;
    const int64_t* stop_token_ids;
    size_t stop_token_count;
    const char* const* stop;
    size_t stop_count;
    int logprobs; /* -1: none */
    double presence_penalty, frequency_penalty;
    double repetition_penalty;
    const int64_t* bias_token_ids; /* biases[i] is added to this token's logit */
    const double* biases;
    size_t bias_count;
    int64_t min_tokens;
    const int64_t* allowed_token_ids; /* null: all tokens */
    size_t allowed_token_count;
    const int64_t* const* bad_words;
    const size_t* bad_word_lengths; /* in tokens */
    size_t bad_word_count;
    pass_allowed_tokens allowed_tokens; /* null: all tokens are allowed */
    void* allowed_tokens_user;
    const char* cache_salt; /* null: "" */
    int reuse_prefix;
} pass_generate_options;

/* As Stats of <pass/event.hpp>. */
typedef struct pass_stats {
    int64_t prompt_tokens, cached_tokens, generated_tokens;
    int64_t passes, steps, drafted, accepted;
    double prefill_seconds, decode_seconds;
} pass_stats;

/* Such as "0.1.0". */
PASS_API const char* pass_version(void);

enum { PASS_LOG_VERBOSE, PASS_LOG_INFO, PASS_LOG_WARNING, PASS_LOG_ERROR };
typedef void (*pass_log_callback)(void* user, int level, const char* message);

/* As set_log of <pass/log.hpp>. `callback` gets `user`; null: errors go to standard error. */
PASS_API void pass_set_log(pass_log_callback callback, void* user, int level);

/* Fill the first `size` bytes of a struct. C programs call the inline functions below instead. */
PASS_API void pass_init_load_options(pass_load_options* options, size_t size);
PASS_API void pass_init_generate_options(pass_generate_options* options, size_t size);
PASS_API void pass_read_stats(const pass_generation* generation, pass_stats* stats, size_t size);

static inline pass_load_options pass_default_load_options(void) {
    pass_load_options options;
    pass_init_load_options(&options, sizeof options);
    return options;
}

static inline pass_generate_options pass_default_generate_options(void) {
    pass_generate_options options;
    pass_init_generate_options(&options, sizeof options);
    return options;
}

static inline pass_stats pass_get_stats(const pass_generation* generation) {
    pass_stats stats;
    pass_read_stats(generation, &stats, sizeof stats);
    return stats;
}

/* Opens the bundle in the directory `bundle`. options: null for the defaults. Null on failure. */
PASS_API pass_session* pass_open(const char* bundle, const pass_load_options* options, char* error,
                                 size_t error_size);
/* Its generations that have not ended report an error; they must still be freed. Ignores null. */
PASS_API void pass_close(pass_session* session);
/* As Session::warm_up without samplings. Returns 0, or -1 on failure. */
PASS_API int pass_warm_up(pass_session* session, char* error, size_t error_size);

/* Writes the first `room` ids of `text`. Returns how many ids it has, or -1 on failure. Needs the
 * option `text`. */
PASS_API int64_t pass_encode(pass_session* session, const char* text, int64_t* ids, size_t room,
                             char* error, size_t error_size);
/* Queues a request, which is copied. options: null for the defaults. Null on failure; otherwise
 * call pass_free in the end. */
PASS_API pass_generation* pass_submit(pass_session* session, const int64_t* prompt_ids,
                                      size_t count, const pass_generate_options* options,
                                      char* error, size_t error_size);
/* As Session::step. Returns 1 if there is more to do, 0 if not, -1 on failure. */
PASS_API int pass_step(pass_session* session, char* error, size_t error_size);
/* Decodes until there are tokens, or waits while another thread decodes, and writes at most `room`
 * (1 or more). Returns how many, 0 at the end, -1 if the request failed. */
PASS_API int pass_next(pass_generation* generation, int64_t* tokens, size_t room, char* error,
                       size_t error_size);
/* As pass_next, but neither decodes nor waits. Returns 0 also if there are no tokens yet;
 * pass_finish_reason returns null until the end. */
PASS_API int pass_poll(pass_generation* generation, int64_t* tokens, size_t room, char* error,
                       size_t error_size);
/* The text that is final so far, also of tokens for which there was no room; "" without the option
 * `text`. length: null, or receives its bytes: it may contain null characters. Valid until the next
 * call of pass_next, pass_poll or pass_free. */
PASS_API const char* pass_text(const pass_generation* generation, size_t* length);
/* Log-probabilities of token `index` of the last pass_next or pass_poll, and of the `room`
 * likeliest tokens in its place; each may be null. Returns how many of these it wrote, or -1 if
 * there are none. */
PASS_API int pass_token_logprobs(const pass_generation* generation, size_t index, float* logprob,
                                 int64_t* top_ids, float* top_logprobs, size_t room);
/* As Generation::cancel. Ignores null. */
PASS_API void pass_cancel(pass_generation* generation);
/* "stop", "length", "cancelled" or "error"; null until pass_next or pass_poll returns the end. */
PASS_API const char* pass_finish_reason(const pass_generation* generation);
/* Cancels its request if it has not ended. Ignores null. */
PASS_API void pass_free(pass_generation* generation);

#ifdef __cplusplus
}
#endif

#endif
