"""The options of a request, and those of loading a bundle."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, Literal

from pydantic import field_validator

from pass_runtime.backends.base import DEFAULT_BATCH, LogprobsMode
from pass_runtime.backends.open import DEVICE_HELP
from pass_runtime.bundle.option import Texts, TokenIds, option, options_class, options_of
from pass_runtime.bundle.plan import PLAN_NAMES, make_plan
from pass_runtime.bundle.sampling import MAX_LOGPROBS, SamplingParams
from pass_runtime.bundle.window import MAX_LOOKAHEAD
from pass_runtime.errors import PassError
from pass_runtime.text.constraint import Constraint

DraftSource = Literal["lookahead", "ngram", "both"]
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_BYTES = 1 << 14
MAX_STOPS = 64
MAX_STOP_BYTES = 1 << 12
"""All strings together have at most so many bytes."""
MAX_SLOTS = 1024
DEFAULT_MAX_QUEUE = 1024
MAX_THREADS = max(64, 4 * (os.cpu_count() or 1))
"""ONNX Runtime hangs with too many."""
PLANS = (*PLAN_NAMES, "fused:G0,G1,...", "auto")


@options_class
class GenerateOptions:
    """What the help of flags does not say:

    plan: "fused:4,3,2,2,1" has so many look-ahead rows after the root and each draft. All
    sequences of a pass have the plan of the oldest request that names one. draft: "both" is
    copied drafts if they are likely, else look-ahead rows. stop may be one string. Stop tokens are
    part of the text, stop strings are not. reuse_prefix: even if LoadOptions.prefix_cache is off,
    or bits of the results change. prompt_logprobs: computes all K/V of the prompt; max_new_tokens
    may be 0. constraint: the request fails if it takes too long. min_tokens, bad_words and
    allowed_token_ids are not applied where they would leave no token.
    """

    max_new_tokens: int = option(
        128,
        "Generate at most this many tokens.",
        ge=0,  # 0 is for prompt_logprobs alone
        allowed="at least 1",
        http=None,  # its name depends on the endpoint
        triton="max_tokens",
    )
    sampling: SamplingParams = field(default_factory=SamplingParams)
    plan: str = option(
        "auto",
        f"The decoding plan, which changes the speed and not the text: {', '.join(PLANS)}.",
    )
    lookahead: int | None = option(
        None,
        "The most drafts of a pass, from any source: 0 (plain decoding) to the bundle's L.",
        if_none="L, and up to 16 for copies",
    )
    draft: DraftSource | None = option(
        None, "Where drafts come from.", if_none="both for auto, else lookahead"
    )
    stop: Texts = option(
        (), "End before this text, which is not part of the output.", triton="stop_words"
    )
    stop_token_ids: TokenIds = option(
        (), "End after this token, as after an end-of-sequence token.", flag="--stop-token-id"
    )
    ignore_eos: bool = option(False, "Go on after an end-of-sequence token.")
    reuse_prefix: bool = False
    cache_salt: str = option(
        "",
        "K/V of prompts are shared only among requests with the same salt.",
        flag=None,
        triton=None,
    )
    logprobs: int | None = option(
        None,
        "Report log-probabilities of every token and of this many most likely ones (0 to "
        f"{MAX_LOGPROBS}).",
        ge=0,
        le=MAX_LOGPROBS,
        http=None,
        triton=None,
    )
    prompt_logprobs: int | None = option(
        None,
        "The same for the tokens of the prompt.",
        ge=0,
        le=MAX_LOGPROBS,
        flag=None,
        http=None,
        triton=None,
    )
    constraint: Constraint | None = None
    min_tokens: int = option(
        0,
        "Do not end before this many tokens are generated.",
        ge=0,
        allowed="0 to max-new-tokens",
        triton=None,
    )
    bad_words: Texts = option((), "Never generate this text.", flag="--bad-word", triton=None)
    allowed_token_ids: TokenIds = option(
        (), "Generate only these tokens.", flag="--allowed-token-id", triton=None
    )
    shown_special_tokens: TokenIds = ()

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_strings(cls, stop: Any) -> Any:
        stops = (stop,) if isinstance(stop, str) else stop
        if not isinstance(stops, tuple) or not all(isinstance(each, str) for each in stops):
            raise PassError(
                "stop must be a string or a list of strings; tokens go into stop_token_ids"
            )
        return tuple(each for each in stops if each)

    def __post_init__(self) -> None:
        if self.plan != "auto":
            make_plan(self.plan, MAX_LOOKAHEAD)  # raises PassError for an unknown plan
        if self.max_new_tokens == 0 and self.prompt_logprobs is None:
            raise PassError("max-new-tokens must be at least 1, not 0, without prompt-logprobs")
        if self.min_tokens > self.max_new_tokens:
            raise PassError(f"min-tokens must be 0 to max-new-tokens, not {self.min_tokens}")
        if self.constraint is not None and self.ignore_eos:
            raise PassError("a constraint ends the text with an end token: leave out ignore-eos")
        _check_size("stop", self.stop, MAX_STOPS, MAX_STOP_BYTES)
        _check_size("bad-words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_BYTES)
        if not all(self.bad_words):
            raise PassError("every one of bad-words must be text that is not empty")
        if any(word.encode(errors="replace").decode() != word for word in self.bad_words):
            raise PassError("bad-words must be Unicode text without lone surrogates")

    def with_fields(self, **fields: Any) -> GenerateOptions:
        """Fields of SamplingParams are changed in `sampling`."""
        names = options_of(SamplingParams).keys() & fields.keys()
        sampling = replace(self.sampling, **{name: fields.pop(name) for name in names})
        return replace(self, sampling=sampling, **fields)


def _check_size(name: str, texts: Sequence[str], most: int, most_bytes: int) -> None:
    size = sum(len(each.encode(errors="surrogatepass")) for each in texts)
    if len(texts) > most or size > most_bytes:
        raise PassError(
            f"{name} must be at most {most} strings, of {most_bytes} bytes together; there are "
            f"{len(texts)}, of {size} bytes"
        )


REQUEST_OPTIONS = {**options_of(SamplingParams), **options_of(GenerateOptions)}
"""By name: fields of requests in flags, batch lines, HTTP and Triton."""


@options_class
class LoadOptions:
    """What the help of flags does not say:

    device: tensorrt and tensorrt-rtx need engines in the bundle. auto: these if they fit, else
    cuda if ONNX Runtime and the machine have it, else cpu. "cuda:1" is the second GPU.
    logprobs_mode: both are before temperature and truncation, as in vLLM. prefix_cache: only
    where it changes no bit: with our kernels on the CPU. verify: unchanged files are read once.
    """

    device: str = option("auto", DEVICE_HELP)
    threads: int = option(
        0,
        "CPU threads; 0 is ONNX Runtime's choice.",
        ge=0,
        le=MAX_THREADS,
        allowed=f"0 (ONNX Runtime's choice) to {MAX_THREADS}",
    )
    max_batch_size: int | None = option(
        1,
        "Most sequences that are decoded together.",
        ge=1,
        le=MAX_SLOTS,
        if_none=f"{DEFAULT_BATCH}, or what the engines were built for",
    )
    max_queue: int = option(DEFAULT_MAX_QUEUE, "Most sequences that may wait.", ge=1, flag=None)
    capacity: int | None = option(
        None,
        "KV capacity of a sequence, in tokens: a multiple of 4.",
        ge=4,
        multiple_of=4,
        allowed="a multiple of 4 and at least 4",
        if_none="the model's",
    )
    logprobs_mode: LogprobsMode = option(
        "raw",
        "raw: log-probabilities of the model's logits; processed: after constraints, biases and "
        "penalties.",
    )
    speculative_max_concurrency: int | None = option(
        None,
        "If more sequences than this are decoded together, decode all without drafts.",
        ge=0,
        if_none="no limit",
    )
    prefix_cache: bool = option(
        True,
        "On the CPU, prompts share the K/V of a common prefix.",
        flag="--no-prefix-cache",
        flag_help="Compute the K/V of every prompt. Otherwise prompts share the K/V of a common "
        "prefix, on the CPU.",
    )
    verify: bool = option(
        True,
        "Check the hashes of the bundle's files.",
        flag="--trust-bundle",
        flag_help="Skip the hash check of the bundle's files.",
    )
