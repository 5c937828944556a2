"""The decoding loop: prefill, then pass after pass until something says stop. It accepts nothing by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pass_runtime.backends.base import Backend
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.decode.draft_policy import Steering
from pass_runtime.decode.stats import Stats
from pass_runtime.errors import PassError

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Request:
    """What to generate. `steering` decides how fast, never what."""

    prompt_ids: tuple[int, ...]
    steering: Steering
    sampling: SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    reuse_prefix: bool = False


class TokenStream:
    """One generation; iterating runs it and yields the tokens of each pass (at least one).

    Afterwards `finish_reason` is "stop" (`stop_reason` then holds the token or string), "length", or "cancelled"
    where the consumer went away early. `token_ids` holds every token kept, a stop token included.
    """

    def __init__(self, backend: Backend, request: Request) -> None:
        self._backend, self._request = backend, request
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.stats = Stats(
            plan=request.steering.name,
            lookahead=request.steering.lookahead,
            prompt_tokens=len(request.prompt_ids),
        )

    def __iter__(self) -> Iterator[list[int]]:
        decode_started = None
        try:
            self._prefill()
            decode_started = time.perf_counter()
            while self.finish_reason is None:
                tokens = self._cut(self._pass())
                self.token_ids += tokens
                self.stats.generated_tokens = len(self.token_ids)
                self.stats.decode_seconds = time.perf_counter() - decode_started
                if tokens:
                    yield tokens
        finally:
            self.finish_reason = self.finish_reason or "cancelled"

    def stop(self, reason: int | str, keep: int) -> None:
        """End here, keeping the first `keep` tokens."""
        del self.token_ids[keep:]
        self.finish_reason, self.stop_reason = "stop", reason
        self.stats.generated_tokens = keep

    def _prefill(self) -> None:
        """Every prompt token but the last, which is the first root."""
        started = time.perf_counter()
        backend, request = self._backend, self._request
        if len(request.prompt_ids) > backend.capabilities.max_capacity:
            raise PassError(
                f"the prompt has {len(request.prompt_ids)} tokens, more than the KV capacity of "
                f"{backend.capabilities.max_capacity}; shorten it"
            )
        prompt, kept = request.prompt_ids, 0
        if request.reuse_prefix:
            kept = _common_prefix(backend.cached, prompt[:-1])
        backend.begin(self, request.sampling, keep=kept)
        for start, stop, width in _chunks(kept, len(prompt) - 1, backend):
            backend.prefill(prompt[start:stop], width)
        backend.root = prompt[-1]
        request.steering.begin(prompt)
        self.stats.cached_tokens = kept
        self.stats.prefill_seconds = time.perf_counter() - started

    def _pass(self) -> list[int]:
        if self._backend.owner is not self:
            raise PassError("this generation was ended by a newer one on the same session; load a second session")
        steering = self._request.steering
        chosen = steering.next(self._backend)
        if chosen is None:
            self.finish_reason = "length"
            return []
        if chosen.drafts is not None:
            self._backend.enter(chosen.plan, chosen.drafts)
        started = time.perf_counter()
        tokens = self._backend.step(chosen.plan)
        steering.record(chosen.plan, tokens, time.perf_counter() - started)
        self.stats.record(steering.drafted, len(tokens))
        return tokens

    def _cut(self, tokens: list[int]) -> list[int]:
        """Up to and including a stop token, and no more than max_new_tokens."""
        for i, token in enumerate(tokens):
            if token in self._request.stop_token_ids:
                self.finish_reason, self.stop_reason = "stop", token
                tokens = tokens[: i + 1]
                break
        room = self._request.max_new_tokens - len(self.token_ids)
        if len(tokens) > room or (len(tokens) == room and self.finish_reason is None):
            self.finish_reason, self.stop_reason = "length", None
        return tokens[:room]


def _chunks(start: int, stop: int, backend: Backend) -> Iterator[tuple[int, int, int]]:
    """Prompt ranges and the window width of each: the widest that is filled, then the narrowest that pads."""
    while start < stop:
        remaining = stop - start
        widths = [w for w in backend.capabilities.prefill_widths if backend.fits(w)]
        filled = [w for w in widths if w <= remaining]
        padded = [w for w in widths if w > remaining]
        width = filled[0] if filled and (filled[0] > 1 or remaining == 1 or not padded) else padded[-1]
        taken = min(width, remaining)
        yield start, start + taken, width
        start += taken


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
