"""The options of a request, and those of loading a bundle."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pass_runtime.backends.base import DEFAULT_BATCH
from pass_runtime.backends.devices import DEVICE_HELP
from pass_runtime.bundle.plan import MAX_LOOKAHEAD, make_cycle
from pass_runtime.bundle.request_fields import (
    DECODING_FIELDS,
    MAX_BAD_WORDS,
    SAMPLING_FIELDS,
)
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.bundle.values import Options, as_flag, as_whole_numbers, option, short_repr
from pass_runtime.errors import PassError
from pass_runtime.text.constraint import Constraint

LOGPROBS_MODES = ("raw", "processed")
"""The values of `logprobs_mode`."""
MAX_BAD_WORD_BYTES = 1 << 14
"""The most bytes of all strings of `bad_words` together."""
MAX_STOPS, MAX_STOP_BYTES = 64, 1 << 12
"""The most strings that `stop` may have, and the most bytes of all of them together."""
MAX_SLOTS = 1024
"""The largest `max_batch_size`. The server and Triton take the same values."""
DEFAULT_MAX_QUEUE = 1024
"""The default of `LoadOptions.max_queue`."""
MAX_THREADS = max(64, 4 * (os.cpu_count() or 1))
"""The largest `threads`: ONNX Runtime hangs with too many."""


@dataclass(frozen=True)
class GenerateOptions:
    """The options of a request.

    plan: "auto" (the fastest), "ar", "two-pass", "fused", "tree-3", "tree-5", "tree-8" or "tree-16"
    (a tree of so many drafts), "fused:4,3,2,2,1" or "tree:2,2,1,0" (how many look-ahead rows follow
    the root, and each draft). All sequences of a pass have the same plan: that of the oldest
    request that names one. A tree becomes a chain unless all requests name a tree or "auto".
    lookahead: look-ahead drafts per pass, 0 (plain decoding) to L of the bundle (None: L).
    draft: where drafts come from, one of `request_fields.DRAFT_SOURCES` (None: "both" for auto,
    else "lookahead").
    stop: strings that end the text and are not part of it, at most MAX_STOPS, of MAX_STOP_BYTES in
    total. A single string may be given without a list. stop_token_ids: tokens that also end the
    text. ignore_eos: the model's own end tokens do not end the text.
    reuse_prefix: reuse K/V of an earlier request of the session that begins with the same tokens,
    even if `LoadOptions.prefix_cache` is off, and even if reuse may change bits of the results.
    cache_salt: K/V are shared only among requests with the same salt.
    logprobs: report with every token its log-probability, and those of this many of the likeliest
    tokens (0 to 20). prompt_logprobs: the same for the tokens of the prompt, whose K/V are then
    computed, not reused; max_new_tokens may be 0 with it.
    constraint: what the text must look like. The request is refused if the constraint takes too
    long to compile, and ends with an error if finding the allowed tokens takes too long
    (`text.grammar`).
    min_tokens: until this many tokens are written, neither the model's end tokens nor
    stop_token_ids are drawn, and a stop string that is complete by then does not end the text.
    bad_words: strings that the text does not contain: a token that would complete one is not drawn.
    The prompt is not part of the text, and special tokens have no text. allowed_token_ids: only
    these tokens are drawn; empty allows all.
    shown_special_tokens: ids of the special tokens whose names the text shows.
    At a position where min_tokens, bad_words or allowed_token_ids would leave no token, it is not
    applied.
    """

    max_new_tokens: int = 128
    sampling: SamplingParams = field(default_factory=SamplingParams)
    plan: str = "auto"
    lookahead: int | None = None
    draft: str | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    reuse_prefix: bool = False
    cache_salt: str = ""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    min_tokens: int = 0
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] = ()
    shown_special_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._check_types()
        if self.plan != "auto":
            make_cycle(self.plan, MAX_LOOKAHEAD)  # raises PassError for an unknown plan
        if self.max_new_tokens == 0 and self.prompt_logprobs is None:
            raise PassError("max-new-tokens must be at least 1, not 0, without prompt-logprobs")
        if self.min_tokens > self.max_new_tokens:
            raise PassError(f"min-tokens must be 0 to max-new-tokens, not {self.min_tokens}")
        if self.constraint is not None and self.ignore_eos:
            raise PassError("a constraint ends the text with an end token: leave out ignore-eos")

    def _check_types(self) -> None:
        """Raise PassError if a field has the wrong type. numpy's numbers become Python's."""
        # a frozen dataclass sets its own fields like this
        set_field = partial(object.__setattr__, self)
        for each in DECODING_FIELDS:
            set_field(each.name, each.checked(getattr(self, each.name)))
        if not isinstance(self.sampling, SamplingParams):
            raise PassError(
                f"sampling must be SamplingParams(...), not {short_repr(self.sampling)}"
            )
        set_field("reuse_prefix", as_flag("reuse-prefix", self.reuse_prefix))
        shown = as_whole_numbers("shown-special-tokens", self.shown_special_tokens)
        set_field("shown_special_tokens", shown)
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, Collection) or not all(isinstance(stop, str) for stop in stops):
            raise PassError(
                "stop must be a string or a list of strings; tokens go into stop_token_ids"
            )
        if len(stops) > MAX_STOPS or _total_bytes(stops) > MAX_STOP_BYTES:
            raise PassError(
                f"stop must be at most {MAX_STOPS} strings, of {MAX_STOP_BYTES} bytes together"
            )
        set_field("stop", tuple(stops))
        if not isinstance(self.constraint, Constraint | None):
            raise PassError(
                f"constraint must be Constraint(...), not {short_repr(self.constraint)}"
            )
        words = self.bad_words
        if isinstance(words, str) or not isinstance(words, Collection):
            raise PassError("bad_words must be a list of strings")
        if not all(isinstance(word, str) and word for word in words) or len(words) > MAX_BAD_WORDS:
            raise PassError(
                f"bad_words must be at most {MAX_BAD_WORDS} strings, none of them empty; there are "
                f"{len(words)}"
            )
        if _total_bytes(words) > MAX_BAD_WORD_BYTES:
            raise PassError(
                f"bad_words must be at most {MAX_BAD_WORD_BYTES} bytes together, not "
                f"{_total_bytes(words)}"
            )
        if any(word.encode(errors="replace").decode() != word for word in words):
            raise PassError("bad_words must be Unicode text without lone surrogates")
        set_field("bad_words", tuple(words))

    def with_fields(self, **fields: Any) -> GenerateOptions:
        """Return a copy with these fields changed; those of SamplingParams are changed in
        `sampling`."""
        names = [each.name for each in SAMPLING_FIELDS if each.name in fields]
        sampling = replace(self.sampling, **{name: fields.pop(name) for name in names})
        return replace(self, sampling=sampling, **fields)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, without empty strings."""
        return tuple(stop for stop in self.stop if stop)


def _total_bytes(texts: Collection[str]) -> int:
    return sum(len(each.encode(errors="surrogatepass")) for each in texts)


@dataclass(frozen=True)
class LoadOptions(Options):
    """How a bundle is loaded: the table from which the flags of commands and the parameters of
    Triton's models are made. If a flag sets a field to False, the help is that of the flag.

    device: cpu or cuda (ONNX Runtime), tensorrt or tensorrt-rtx (the bundle's engines), or auto:
    the bundle's engines if they fit this machine, else cuda if ONNX Runtime and the machine have
    CUDA, else cpu. "cuda:1" is the second GPU.
    max_batch_size: the most sequences that decode together. max_queue: the most sequences that may
    wait. capacity: the KV capacity in tokens, which bounds the length of a sequence; a multiple of
    4, as TensorRT needs.
    logprobs_mode: log-probabilities are "raw", the model's own, or "processed", after constraints,
    biases and penalties (as vLLM's raw_logprobs and processed_logprobs); both before temperature
    and truncation.
    speculative_max_concurrency: if more sequences than this decode at a time, all of them are
    decoded plainly, whatever plans they name. prefix_cache: reuse K/V of earlier requests that
    begin with the same tokens, on engines on which this changes no bit of the results (our kernels
    on the CPU). verify: compare the hashes of the bundle's files with the manifest's; a file that
    was verified before and has not changed is not read again.
    """

    device: str = option("auto", DEVICE_HELP)
    threads: int = option(
        0,
        "CPU threads; 0 is ONNX Runtime's choice.",
        allowed=f"0 (ONNX Runtime's choice) to {MAX_THREADS}",
        bounds={"ge": 0, "le": MAX_THREADS},
    )
    max_batch_size: int | None = option(
        1,
        "Most sequences that are decoded together.",
        if_none=f"{DEFAULT_BATCH}, or what the engines were built for",
        allowed=f"1 to {MAX_SLOTS}",
        bounds={"ge": 1, "le": MAX_SLOTS},
    )
    max_queue: int = option(
        DEFAULT_MAX_QUEUE, "Most sequences that may wait.", bounds={"ge": 1}, flag=None
    )
    capacity: int | None = option(
        None, "KV capacity of a sequence, in tokens: a multiple of 4.", if_none="the model's"
    )
    logprobs_mode: str = option(
        "raw",
        "raw: log-probabilities of the model's logits; processed: after constraints, biases and "
        "penalties.",
        choices=LOGPROBS_MODES,
    )
    speculative_max_concurrency: int | None = option(
        None,
        "If more sequences than this are decoded together, decode all without drafts.",
        if_none="no limit",
        bounds={"ge": 0},
    )
    prefix_cache: bool = option(
        True,
        "Compute the K/V of every prompt. Otherwise prompts share the K/V of a common prefix, on "
        "the CPU.",
        flag="--no-prefix-cache",
    )
    verify: bool = option(True, "Skip the hash check of the bundle's files.", flag="--trust-bundle")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capacity is not None and (self.capacity < 4 or self.capacity % 4):
            raise PassError(f"capacity must be a multiple of 4 and at least 4, not {self.capacity}")
