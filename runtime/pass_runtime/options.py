"""What a request may ask for, and how a bundle is opened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from pass_runtime.bundle.plan import MODES, make_cycle
from pass_runtime.bundle.sampling import MAX_LOGPROBS, SamplingParams
from pass_runtime.decode.draft_policy import DRAFTS
from pass_runtime.errors import PassError

PLANS = (*MODES, "fused:G0,G1,...", "auto")
"""What `plan` may be; the sizes G0, G1, ... are those of a fused plan's look-ahead groups."""

MAX_QUEUE = 1024
"""Requests that may wait, where nobody says otherwise."""
MAX_THREADS = max(64, 4 * (os.cpu_count() or 1))
"""More threads than this make ONNX Runtime hang rather than faster."""


@dataclass(frozen=True)
class GenerateOptions:
    """Everything a request may ask for.

    plan: "ar", "two-pass", "fused", "fused:4,3,2,2,1" (sizes of its groups), or "auto": whatever is fastest here. A
    pass runs one plan for all sequences of a batch: the oldest request that names one decides.
    lookahead: drafts per round, at most the bundle's L (None: all of them; 0: plain decoding).
    draft: where drafts come from, one of `pass_runtime.decode.draft_policy.DRAFTS` (None: "both" for auto, else
    "lookahead").
    stop: strings that end the text and are not part of it (one string is one stop). stop_token_ids: tokens that end it
    besides the model's own, which ignore_eos turns off.
    reuse_prefix: keep the K/V that an earlier request on this session has in common with this one.
    logprobs: tell of every token its log-probability, and those of so many of the most likely ones (0 to 20).
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
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise PassError(f"max-new-tokens must be at least 1, not {self.max_new_tokens}")
        if self.plan != "auto":
            make_cycle(self.plan, 1)  # refuses what is no plan
        if self.draft not in (None, *DRAFTS):
            raise PassError(f"unknown draft source {self.draft!r}: choose one of {', '.join(DRAFTS)}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise PassError(f"logprobs must be 0 to {MAX_LOGPROBS}, not {self.logprobs}")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(stop, str) for stop in stops):
            raise PassError("stop must be a string or a list of strings; tokens go into stop_token_ids")
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, without empty strings."""
        return tuple(stop for stop in self.stop if stop)


@dataclass(frozen=True)
class LoadOptions:
    """How a bundle is opened.

    device: cpu or cuda (ONNX Runtime), tensorrt or tensorrt-rtx (the bundle's engines), or auto: the bundle's engines
    where they fit this machine, else ONNX Runtime on CUDA, else on the CPU.
    threads: of the CPU, 0 is the engine's choice. max_batch_size: sequences that decode together (None: as many as
    engines were built for, else DEFAULT_BATCH); others wait, at most max_queue of them. capacity: the longest sequence
    in tokens (None: the model's), which bounds the KV cache.
    """

    device: str = "auto"
    threads: int = 0
    max_batch_size: int | None = 1
    max_queue: int = MAX_QUEUE
    capacity: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= MAX_THREADS:
            raise PassError(f"threads must be 0 (the engine's choice) to {MAX_THREADS}, not {self.threads}")
        if self.max_batch_size is not None and not 1 <= self.max_batch_size <= 1024:
            raise PassError(f"max-batch-size must be 1 to 1024, not {self.max_batch_size}")
        if self.max_queue < 1:
            raise PassError(f"max-queue must be at least 1, not {self.max_queue}")
        if self.capacity is not None and (self.capacity < 4 or self.capacity % 4):
            raise PassError(f"capacity must be a multiple of 4, not {self.capacity}")
