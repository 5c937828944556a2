// The sampling fields. Written by scripts/field_tables.py from SamplingParams; do not edit.
// clang-format off
#pragma once

#include <float.h>
#include <stdint.h>

// FIELD(type, name, default, min, max, flag, allowed, help)
#define PASS_TEMPERATURE_FIELD(FIELD) \
    FIELD(double, temperature, 0.0, 0.0, DBL_MAX, "--temperature", "a number of at least 0", \
          "0 takes the most likely token; higher values make unlikely tokens more likely.")

#define PASS_TRUNCATION_FIELDS(FIELD) \
    FIELD(int64_t, top_k, 0, -1, 1024, "--top-k", "0 or -1 (off) to 1024", \
          "Draw from this many of the most likely tokens, at most 1024. 0 and -1 are off.") \
    FIELD(double, top_p, 1.0, 0.0, 1.0, "--top-p", "0 to 1 (off)", \
          "Draw from the most likely tokens that together have this probability. 1 is off, " \
          "0 takes the most likely token.") \
    FIELD(double, min_p, 0.0, 0.0, 1.0, "--min-p", "0 (off) to 1", \
          "Remove tokens less likely than this share of the most likely token's " \
          "probability. 0 is off.")

#define PASS_PENALTY_FIELDS(FIELD) \
    FIELD(double, presence_penalty, 0.0, -2.0, 2.0, "--presence-penalty", "-2 to 2 (0 is off)", \
          "Subtracted from the logit of every token already generated.") \
    FIELD(double, frequency_penalty, 0.0, -2.0, 2.0, "--frequency-penalty", "-2 to 2 (0 is off)", \
          "Subtracted from a token's logit once for each time it was generated.") \
    FIELD(double, repetition_penalty, 1.0, 0.01, 100.0, "--repetition-penalty", "0.01 to 100 (1 is off)", \
          "Divides positive and multiplies negative logits of tokens in the prompt or the " \
          "output.")

#define PASS_SEED_FIELD(FIELD) \
    FIELD(uint64_t, seed, 0, 0, UINT64_MAX, "--seed", "0 to 2^64-1", \
          "The same seed gives the same text, whatever the plan.")

#define PASS_LOGIT_BIAS_FIELD(FIELD) \
    FIELD(double, logit_bias, 0.0, -100.0, 100.0, "--logit-bias", "-100 to 100", \
          "Added to the logit of a token, by token id.")

#define PASS_TAIL_FIELDS(FIELD) PASS_TEMPERATURE_FIELD(FIELD) PASS_TRUNCATION_FIELDS(FIELD)
#define PASS_SAMPLING_FIELDS(FIELD) PASS_TAIL_FIELDS(FIELD) PASS_PENALTY_FIELDS(FIELD)

#define PASS_MAX_BIASES 1024
#define PASS_MAX_LOGPROBS 20
#define PASS_MAX_BAD_WORDS 1024
#define PASS_MAX_STOPS 64
#define PASS_MAX_STOP_BYTES 4096
