/* libpass for C, and for whatever can call C.
 *
 * Functions that can fail take `error`, room for a line of `error_size` bytes, which says what to do next; it may be
 * null. A session has no thread of its own: whoever waits in pass_next, or calls pass_step, decodes for everybody. Any
 * thread may call functions of a session; a generation is for one reader, but pass_cancel is for any thread.
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
    const char* device;      /* "auto", "cpu", "cuda", "tensorrt", "tensorrt-rtx", "tensorrt-rtx-ep" */
    const char* onnxruntime; /* libonnxruntime.so; null: $PASS_ONNXRUNTIME, then where it was found at build time */
    int threads;             /* of the CPU; 0 is ONNX Runtime's choice */
    int max_batch_size;      /* sequences that decode together */
    int64_t max_queue;       /* requests that may wait */
    int64_t capacity;        /* longest sequence in tokens; 0: the model's */
    int verify;              /* check the hashes of the bundle's files */
} pass_load_options;

typedef struct pass_generate_options {
    int64_t max_new_tokens;
    double temperature; /* 0 is greedy */
    int64_t top_k;      /* 0 is off */
    double top_p;       /* 1 is off */
    double min_p;       /* 0 is off */
    int has_seed;       /* 0: sampling takes a seed from the system */
    uint64_t seed;
    const char* plan;  /* "auto", "ar", "two-pass", "fused", "fused:4,3,2,2,1" */
    const char* draft; /* null, "lookahead", "ngram", "both" */
    int lookahead;     /* drafts per round; -1: the bundle's */
    int ignore_eos;
    const int64_t* stop_token_ids;
    size_t stop_token_count;
} pass_generate_options;

typedef struct pass_stats {
    int64_t prompt_tokens, cached_tokens, generated_tokens;
    int64_t passes, steps, drafted, accepted;
    double prefill_seconds, decode_seconds;
} pass_stats;

PASS_API pass_load_options pass_default_load_options(void);
PASS_API pass_generate_options pass_default_generate_options(void);

/* Null where it failed. options may be null. */
PASS_API pass_session* pass_open(const char* bundle, const pass_load_options* options, char* error, size_t error_size);
/* Generations that are left must still be freed. */
PASS_API void pass_close(pass_session* session);

/* Null where it failed. options may be null. */
PASS_API pass_generation* pass_submit(pass_session* session, const int64_t* prompt_ids, size_t count,
                                      const pass_generate_options* options, char* error, size_t error_size);
/* One round for everybody: 1 where there is more to do, 0 where there is not, -1 where it failed. */
PASS_API int pass_step(pass_session* session, char* error, size_t error_size);
/* Waits for the next tokens, of which at most `room` are written to `tokens`: how many, 0 at the end, -1 where the
 * request failed. */
PASS_API int pass_next(pass_generation* generation, int64_t* tokens, size_t room, char* error, size_t error_size);
PASS_API void pass_cancel(pass_generation* generation);
/* "stop", "length", "cancelled", "error"; null before the end was read. */
PASS_API const char* pass_finish_reason(const pass_generation* generation);
PASS_API pass_stats pass_get_stats(const pass_generation* generation);
/* Cancels what is under way. Null is fine. */
PASS_API void pass_free(pass_generation* generation);

#ifdef __cplusplus
}
#endif

#endif
