/* libpass for C, and for languages that can call C.
 *
 * Many functions take `error`, a buffer of `error_size` bytes, or null. If they fail, it receives
 * one line that says what to do next.
 *
 * A session has no thread of its own that decodes: your thread decodes for all requests while it is
 * in pass_next or pass_step. Any thread may call functions of a session. Only one thread at a time
 * may use a generation, but any thread may call pass_cancel.
 *
 * Option structs begin with their size, which pass_default_load_options and
 * pass_default_generate_options set. So programs that were compiled with an older version of this
 * header work with a newer library of the same soname. Fields such as `verify` are 0 (off) or 1
 * (on). Strings are UTF-8.
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

typedef struct pass_load_options {
    size_t size;             /* sizeof(pass_load_options) */
    const char* device;      /* as LoadOptions::device of <pass/options.hpp> */
    const char* onnxruntime; /* libonnxruntime.so; null: as an empty LoadOptions::onnxruntime */
    int threads;             /* CPU threads; 0 lets ONNX Runtime choose */
    int max_batch_size;      /* slots: the most sequences that decode together */
    int64_t max_queue;       /* the most requests that may wait for a slot */
    int64_t capacity;        /* KV capacity in tokens, a multiple of 4; 0: LoadOptions' default */
    int verify;              /* compare the hashes of the bundle's files */
    int text;                /* open the bundle's tokenizer, which text and stop strings need */
    int64_t speculative_max_concurrency; /* with more sequences, none drafts; -1: no limit */
    int prefix_cache;                    /* as LoadOptions::prefix_cache */
} pass_load_options;

/* As AllowedTokens of <pass/options.hpp>. user: `allowed_tokens_user` of the options. `text` has
 * `count` tokens, `allowed` has `words` words. Returns 0, or anything else to end the request with
 * an error. */
typedef int (*pass_allowed_tokens)(void* user, const int64_t* text, size_t count, uint32_t* allowed,
                                   size_t words);

typedef struct pass_generate_options {
    size_t size; /* sizeof(pass_generate_options) */
    int64_t max_new_tokens;
    double temperature; /* 0 is greedy */
    int64_t top_k;      /* 0 and -1 are off */
    double top_p;       /* 1 is off, 0 is greedy */
    double min_p;       /* 0 is off */
    int has_seed;       /* 0: `seed` is ignored, and a random one used */
    uint64_t seed;
    const char* plan;  /* as GenerateOptions::plan: "auto", "ar", "two-pass", "fused", ... */
    const char* draft; /* "lookahead", "ngram" or "both"; null: as GenerateOptions::draft */
    int lookahead;     /* the most look-ahead drafts of a pass; -1: L of the bundle */
    int ignore_eos;    /* the model's own end tokens do not end the text */
    const int64_t* stop_token_ids; /* tokens that also end the text */
    size_t stop_token_count;
    const char* const* stop; /* strings that end the text and are not part of it */
    size_t stop_count;
    int logprobs;                               /* as GenerateOptions::logprobs; -1: none */
    double presence_penalty, frequency_penalty; /* -2 to 2; 0 is off */
    double repetition_penalty;                  /* 0.01 to 100; 1 is off */
    const int64_t* bias_token_ids;              /* biases[i] is added to this token's logit */
    const double* biases;
    size_t bias_count;
    int64_t min_tokens; /* until so many are written, no token or string ends the text */
    const int64_t* allowed_token_ids; /* only these are drawn; null: all tokens */
    size_t allowed_token_count;
    const int64_t* const* bad_words; /* sequences of tokens that the text does not contain */
    const size_t* bad_word_lengths;  /* of each, in tokens */
    size_t bad_word_count;
    pass_allowed_tokens allowed_tokens; /* for grammars; null: all tokens are allowed */
    void* allowed_tokens_user;
    const char* cache_salt; /* a request reuses K/V only of requests with the same salt; null: "" */
    int reuse_prefix;       /* as GenerateOptions::reuse_prefix */
} pass_generate_options;

/* Counts and times of one generation, as in Stats of <pass/event.hpp>. */
typedef struct pass_stats {
    int64_t prompt_tokens, cached_tokens, generated_tokens;
    int64_t passes, steps, drafted, accepted;
    double prefill_seconds, decode_seconds;
} pass_stats;

/* The version of the library, such as "0.1.0". */
PASS_API const char* pass_version(void);

enum { PASS_LOG_VERBOSE, PASS_LOG_INFO, PASS_LOG_WARNING, PASS_LOG_ERROR };
typedef void (*pass_log_callback)(void* user, int level, const char* message);

/* Sends all messages of this process of at least `level` to `callback`, together with `user`. Until
 * the first call, or if `callback` is null, only errors of the engines are written, to standard
 * error. Call it before opening sessions. Several threads may call `callback` at once. It must not
 * call the library. */
PASS_API void pass_set_log(pass_log_callback callback, void* user, int level);

/* These fill only the first `size` bytes of a struct, those that the caller's header has. C
 * programs call the inline functions below instead. */
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

/* Opens the bundle in the directory `bundle`. options: null for the defaults. Returns null on
 * failure. */
PASS_API pass_session* pass_open(const char* bundle, const pass_load_options* options, char* error,
                                 size_t error_size);
/* Closes and frees a session. Its generations that have not ended report an error; they must still
 * be freed. Ignores null. */
PASS_API void pass_close(pass_session* session);
/* As Session::warm_up without samplings. Returns 0, or -1 on failure. */
PASS_API int pass_warm_up(pass_session* session, char* error, size_t error_size);

/* Writes the first `room` ids of `text` to `ids`. Returns how many ids `text` has, or -1 on
 * failure. Needs the option `text`. */
PASS_API int64_t pass_encode(pass_session* session, const char* text, int64_t* ids, size_t room,
                             char* error, size_t error_size);
/* Queues a request. Copies the prompt and what `options` points to. options: null for the defaults.
 * Returns null on failure; otherwise call pass_free in the end. */
PASS_API pass_generation* pass_submit(pass_session* session, const int64_t* prompt_ids,
                                      size_t count, const pass_generate_options* options,
                                      char* error, size_t error_size);
/* Runs one step of the scheduler, such as a pass, for all requests. Returns 1 if there is more to
 * do, 0 if not, -1 on failure. */
PASS_API int pass_step(pass_session* session, char* error, size_t error_size);
/* Decodes until there are tokens, or waits while another thread decodes, and writes at most `room`
 * (1 or more) of them to `tokens`. Returns how many, 0 at the end, -1 if the request failed. */
PASS_API int pass_next(pass_generation* generation, int64_t* tokens, size_t room, char* error,
                       size_t error_size);
/* As pass_next, but neither decodes nor waits: writes tokens of passes that other calls ran.
 * Returns 0 also if there are no tokens yet; pass_finish_reason returns null until the end. */
PASS_API int pass_poll(pass_generation* generation, int64_t* tokens, size_t room, char* error,
                       size_t error_size);
/* The text that is final so far, also that of tokens for which pass_next had no room; "" without
 * the option `text`. length: null, or receives the length in bytes, because the text may contain
 * null characters. The text is valid until the next call of pass_next, pass_poll or pass_free. */
PASS_API const char* pass_text(const pass_generation* generation, size_t* length);
/* Of token `index` of the last pass_next or pass_poll, writes the log-probability to `logprob`, and
 * ids and log-probabilities of the `room` likeliest tokens to `top_ids` and `top_logprobs`. Each of
 * the three may be null. Returns how many likely tokens it wrote, or -1 if there is no such token
 * or no log-probabilities were requested. */
PASS_API int pass_token_logprobs(const pass_generation* generation, size_t index, float* logprob,
                                 int64_t* top_ids, float* top_logprobs, size_t room);
/* Ends the request after the pass in progress; its tokens can still be read. Ignores null. */
PASS_API void pass_cancel(pass_generation* generation);
/* "stop", "length", "cancelled" or "error"; null until pass_next or pass_poll returns the end. */
PASS_API const char* pass_finish_reason(const pass_generation* generation);
/* Frees a generation. Cancels its request if it has not ended. Ignores null. */
PASS_API void pass_free(pass_generation* generation);

#ifdef __cplusplus
}
#endif

#endif
