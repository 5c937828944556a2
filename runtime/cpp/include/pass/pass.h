/* libpass for C, and for languages that can call C.
 *
 * If a function fails, `error`, a buffer of `error_size` bytes or null, receives one line that says
 * what to do next. No thread of a session decodes by itself: your thread decodes for all requests
 * while it is in pass_next or pass_step. pass_poll neither decodes nor waits. Any thread may call
 * functions of a session; only one thread at a time may use a generation, but any thread may call
 * pass_cancel. Strings are UTF-8.
 *
 * Option structs begin with their size, which pass_default_..._options sets: programs that were
 * compiled with an older version of this header keep working with a newer library of the same
 * soname. A switch such as `verify` is 0 or 1.
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
    const char* onnxruntime; /* libonnxruntime.so; null: as LoadOptions::onnxruntime */
    int threads;             /* CPU threads; 0 lets ONNX Runtime choose */
    int max_batch_size;      /* sequences that decode together */
    int64_t max_queue;       /* requests that may wait */
    int64_t capacity;        /* longest sequence in tokens, a multiple of 4; 0: the most possible */
    int verify;              /* compare the hashes of the bundle's files */
    int text;                /* open the bundle's tokenizer, which text and stop strings need */
    int weight_cache;        /* on the CPU, map weights that the Python runtime has packed for it */
    int64_t speculative_max_concurrency; /* with more sequences, none drafts; -1: no limit */
    int prefix_cache; /* reuse K/V of earlier requests if that changes no bit of the results */
} pass_load_options;

/* As AllowedTokens of <pass/options.hpp>. `text` has `count` tokens, `allowed` has `words` words.
 * Returns 0, or anything else to end the request with an error. */
typedef int (*pass_allowed_tokens)(void* user, const int64_t* text, size_t count, uint32_t* allowed,
                                   size_t words);

typedef struct pass_generate_options {
    size_t size; /* sizeof(pass_generate_options) */
    int64_t max_new_tokens;
    double temperature; /* 0 is greedy */
    int64_t top_k;      /* 0 is off */
    double top_p;       /* 1 is off */
    double min_p;       /* 0 is off */
    int has_seed;       /* 0: sampling draws a seed from the system */
    uint64_t seed;
    const char* plan;  /* "auto", "ar", "two-pass", "fused", "fused:4,3,2,2,1" */
    const char* draft; /* null, "lookahead", "ngram", "both" */
    int lookahead;     /* most look-ahead drafts of a pass; -1: the bundle's L */
    int ignore_eos;
    const int64_t* stop_token_ids;
    size_t stop_token_count;
    const char* const* stop; /* strings that end the text and are not part of it */
    size_t stop_count;
    int logprobs; /* report log-probabilities, also of the 0 to 20 most likely tokens; -1: none */
    double presence_penalty, frequency_penalty; /* -2 to 2; 0 is off */
    double repetition_penalty;                  /* 0.01 to 100; 1 is off */
    const int64_t* bias_token_ids;              /* tokens whose logits `biases` are added to */
    const double* biases;
    size_t bias_count;
    int64_t min_tokens;               /* until so many are written, nothing ends the text */
    const int64_t* allowed_token_ids; /* no other tokens are drawn; null: all */
    size_t allowed_token_count;
    const int64_t* const* bad_words; /* token sequences that are never written */
    const size_t* bad_word_lengths;
    size_t bad_word_count;
    pass_allowed_tokens allowed_tokens; /* null: all */
    void* allowed_tokens_user;
    const char* cache_salt; /* a request reuses K/V only of requests with the same salt; null: "" */
    int reuse_prefix;       /* 1: reuse K/V of prompt prefixes even if results may change in bits */
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

/* Gives this process's messages of `level` and above to `callback`, with `user`. Until the first
 * call, or if `callback` is null, only errors of the engines are written, to standard error. Call
 * it before opening sessions. Several threads may call the callback at once. The callback must not
 * call the library. */
PASS_API void pass_set_log(pass_log_callback callback, void* user, int level);

/* Fill the first `size` bytes of a struct, those that the caller's header has. C programs call the
 * inline functions below instead. */
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

/* Opens the bundle in the directory `bundle`. Returns null on failure. options: null for the
 * defaults. */
PASS_API pass_session* pass_open(const char* bundle, const pass_load_options* options, char* error,
                                 size_t error_size);
/* Generations that have not ended then report an error; free them all the same. Ignores null. */
PASS_API void pass_close(pass_session* session);
/* Does what the first requests would wait for; see Session::warm_up. Returns 0, -1 on failure. */
PASS_API int pass_warm_up(pass_session* session, char* error, size_t error_size);

/* Writes the ids of `text` to `ids`, at most `room` of them. Returns how many ids `text` has, or -1
 * on failure. Needs the option `text`. */
PASS_API int64_t pass_encode(pass_session* session, const char* text, int64_t* ids, size_t room,
                             char* error, size_t error_size);
/* Queues a request, and copies its prompt and options. options: null for the defaults. Returns null
 * on failure; the result must be freed with pass_free. */
PASS_API pass_generation* pass_submit(pass_session* session, const int64_t* prompt_ids,
                                      size_t count, const pass_generate_options* options,
                                      char* error, size_t error_size);
/* Runs one step of the scheduler, for all requests. Returns 1 if there is more to do, 0 if not, -1
 * on failure. */
PASS_API int pass_step(pass_session* session, char* error, size_t error_size);
/* Waits for the next tokens, and writes at most `room` (1 or more) of them to `tokens`. Returns how
 * many it wrote, 0 at the end, -1 if the request failed. */
PASS_API int pass_next(pass_generation* generation, int64_t* tokens, size_t room, char* error,
                       size_t error_size);
/* As pass_next, but without decoding or waiting, for tokens of passes that other calls have run.
 * Returns 0 also if there are none yet; pass_finish_reason is null until the end. */
PASS_API int pass_poll(pass_generation* generation, int64_t* tokens, size_t room, char* error,
                       size_t error_size);
/* The text that is final so far, also that of tokens for which pass_next had no room; "" without
 * the option `text`. length: receives its length in bytes, because it may contain null characters;
 * may be null. The text is valid until the next call of pass_next, pass_poll or pass_free. */
PASS_API const char* pass_text(const pass_generation* generation, size_t* length);
/* Writes the log-probability of token `index` of the last pass_next or pass_poll to `logprob`, and
 * at most `room` of the most likely tokens to `top_ids` and `top_logprobs`; each may be null.
 * Returns how many likely tokens it wrote, or -1 if there is no such token or no log-probabilities
 * were requested. */
PASS_API int pass_token_logprobs(const pass_generation* generation, size_t index, float* logprob,
                                 int64_t* top_ids, float* top_logprobs, size_t room);
/* Ends the request after the pass in progress; its tokens can still be read. Ignores null. */
PASS_API void pass_cancel(pass_generation* generation);
/* "stop", "length", "cancelled", "error"; null until pass_next or pass_poll returns the end. */
PASS_API const char* pass_finish_reason(const pass_generation* generation);
/* Cancels the request if it has not ended. Ignores null. */
PASS_API void pass_free(pass_generation* generation);

#ifdef __cplusplus
}
#endif

#endif
