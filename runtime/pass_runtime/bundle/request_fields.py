"""The table of a request's fields, each a `RequestField` of `values`.

It defines the checks of `SamplingParams` and `GenerateOptions`, the flags of `pass-run`, the JSON
schemas of `pass-run batch` and of the HTTP API, and the inputs of a Triton model.
"""

from __future__ import annotations

from pass_runtime.bundle.plan import MODES
from pass_runtime.bundle.tree import TREE_SIZES
from pass_runtime.bundle.values import RequestField

MAX_CANDIDATES = 1024
"""Truncated sampling looks at this many of the most likely tokens; `top_k` is at most this."""

MAX_LOGPROBS = 20
"""How many of the most likely tokens can be reported along with the one that was written."""

MIN_REPETITION_PENALTY = 0.01
"""The smallest `repetition_penalty`. The largest is 1 / MIN_REPETITION_PENALTY."""

MAX_BAD_WORDS = 1024
"""The most strings that `bad_words` may have."""

PLANS = (
    *MODES,
    "fused:G0,G1,...",
    *(f"tree-{size}" for size in TREE_SIZES),
    "tree:G0,G1,...",
    "auto",
)
"""The values of `plan`; G0, G1, ... are the sizes of the look-ahead groups."""

DRAFT_SOURCES = ("lookahead", "ngram", "both")
"""The values of `draft`: look-ahead rows, n-grams of the text so far (prompt lookup), or n-grams if
one matches and look-ahead rows if none does."""

SAMPLER_FIELDS = (
    RequestField(
        "temperature",
        "number",
        0.0,
        "0 takes the most likely token; higher values make unlikely tokens more likely.",
        allowed="a number of at least 0",
        bounds={"ge": 0, "lt": float("inf")},
        http_schema={"ge": 0, "le": 2, "description": "0 takes the most likely token. Default 1."},
    ),
    RequestField(
        "top_k",
        "whole",
        0,
        f"Draw from this many of the most likely tokens, at most {MAX_CANDIDATES}. 0 and -1 are "
        "off.",
        allowed=f"0 or -1 (off) to {MAX_CANDIDATES}",
        bounds={"ge": -1, "le": MAX_CANDIDATES},
    ),
    RequestField(
        "top_p",
        "number",
        1.0,
        "Draw from the most likely tokens that together have this probability. 1 is off, 0 takes "
        "the most likely token.",
        allowed="0 to 1 (off)",
        bounds={"ge": 0, "le": 1},
    ),
    RequestField(
        "min_p",
        "number",
        0.0,
        "Remove tokens less likely than this share of the most likely token's probability. 0 "
        "is off.",
        allowed="0 (off) to 1",
        bounds={"ge": 0, "le": 1},
    ),
    RequestField(
        "seed",
        "whole",
        None,
        "The same seed gives the same text, whatever the plan.",
        allowed="0 to 2^64-1",
        bounds={"ge": 0, "lt": 1 << 64},
        if_none="random",
        http_schema={
            "ge": -(1 << 63),
            "lt": 1 << 64,
            "description": "Negative seeds are taken modulo 2^64.",
        },
        dtype="UINT64",
    ),
)
"""The fields of `SamplingParams` that decide how a token is drawn from the logits."""

PENALTY_FIELDS = (
    RequestField(
        "presence_penalty",
        "number",
        0.0,
        "Subtracted from the logit of every token already generated.",
        allowed="-2 to 2 (0 is off)",
        bounds={"ge": -2, "le": 2},
    ),
    RequestField(
        "frequency_penalty",
        "number",
        0.0,
        "Subtracted from a token's logit once for each time it was generated.",
        allowed="-2 to 2 (0 is off)",
        bounds={"ge": -2, "le": 2},
    ),
    RequestField(
        "repetition_penalty",
        "number",
        1.0,
        "Divides positive and multiplies negative logits of tokens in the prompt or the output.",
        allowed=f"{MIN_REPETITION_PENALTY} to {1 / MIN_REPETITION_PENALTY:.0f} (1 is off)",
        bounds={"ge": MIN_REPETITION_PENALTY, "le": 1 / MIN_REPETITION_PENALTY},
    ),
    RequestField(
        "logit_bias",
        "biases",
        {},
        "Added to the logit of a token, by token id.",
        metavar="TOKEN=BIAS",
        allowed="-100 to 100",
        bounds={"ge": -100, "le": 100},
        triton=None,
    ),
)
"""The fields of `SamplingParams` that change the logits before a token is drawn."""

SAMPLING_FIELDS = SAMPLER_FIELDS + PENALTY_FIELDS
"""The fields of `SamplingParams`."""

DECODING_FIELDS = (
    RequestField(
        "max_new_tokens",
        "whole",
        128,
        "Generate at most this many tokens.",
        allowed="at least 1",
        bounds={"ge": 0},  # 0 is for prompt_logprobs alone
        triton="max_tokens",
        http=None,  # max_tokens, max_completion_tokens or max_output_tokens, by endpoint
    ),
    RequestField(
        "min_tokens",
        "whole",
        0,
        "Do not end before this many tokens are generated.",
        allowed="0 to max-new-tokens",
        bounds={"ge": 0},
        triton=None,
    ),
    RequestField(
        "bad_words",
        "texts",
        (),
        "Never generate this text.",
        flag="--bad-word",
        http_schema={"max_length": MAX_BAD_WORDS, "fail_fast": True},
        triton=None,
    ),
    RequestField(
        "allowed_token_ids",
        "ids",
        (),
        "Generate only these tokens.",
        flag="--allowed-token-id",
        http_schema={"min_length": 1},
        triton=None,
    ),
    RequestField(
        "plan",
        "text",
        "auto",
        f"The decoding plan, which changes the speed and not the text: {', '.join(PLANS)}.",
        http_schema={"max_length": 100},
    ),
    RequestField(
        "draft",
        "text",
        None,
        "Where drafts come from.",
        choices=DRAFT_SOURCES,
        if_none="both for auto, else lookahead",
    ),
    RequestField(
        "lookahead",
        "whole",
        None,
        "Drafts per pass; 0 is plain decoding.",
        if_none="the bundle's L",
        http_schema={"ge": 0},
    ),
    RequestField(
        "stop",
        "stops",
        (),
        "End before this text, which is not part of the output.",
        triton="stop_words",
    ),
    RequestField(
        "stop_token_ids",
        "ids",
        (),
        "End after this token, as after an end-of-sequence token.",
        flag="--stop-token-id",
        http_schema={"max_length": 64},
    ),
    RequestField("ignore_eos", "flag", False, "Go on after an end-of-sequence token."),
    RequestField(
        "logprobs",
        "whole",
        None,
        "Report log-probabilities of every token and of this many most likely ones (0 to "
        f"{MAX_LOGPROBS}).",
        allowed=f"0 to {MAX_LOGPROBS}",
        bounds={"ge": 0, "le": MAX_LOGPROBS},
        http=None,
        triton=None,
    ),
    RequestField(
        "prompt_logprobs",
        "whole",
        None,
        "The same for the tokens of the prompt.",
        allowed=f"0 to {MAX_LOGPROBS}",
        bounds={"ge": 0, "le": MAX_LOGPROBS},
        http=None,
        flag=None,
        triton=None,
    ),
    RequestField(
        "cache_salt",
        "text",
        "",
        "K/V of prompts are shared only among requests with the same salt.",
        http_schema={"min_length": 1, "max_length": 256},
        flag=None,
        triton=None,
    ),
)
"""The fields of `GenerateOptions`, except `sampling`, `constraint` and `reuse_prefix`."""

REQUEST_FIELDS = SAMPLING_FIELDS + DECODING_FIELDS
"""All fields."""
