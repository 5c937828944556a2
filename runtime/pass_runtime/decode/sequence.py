"""Requests, and their state from the queue to the end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pass_runtime.backends.base import Drafts, ProcessedRows
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.sampling import Sampler, SamplingParams
from pass_runtime.decode.copies import CopyIndex
from pass_runtime.decode.processors import Processing, Processors
from pass_runtime.decode.stats import Stats
from pass_runtime.errors import PassError
from pass_runtime.tuning.auto import Rates

if TYPE_CHECKING:
    from pass_runtime.text.detokenizer import TextStream

FinishReason = Literal["stop", "length", "cancelled", "error"]
TokenSource = Literal["model", "lookahead", "ngram", "grammar"]
"""The model alone (a bonus token), or what made an accepted draft."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities before temperature and truncation: of the token, and `top` of
    the likeliest (id, log-probability)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Token:
    """text: what it made final; "" if the request wants no text."""

    id: int
    source: TokenSource
    logprobs: TokenLogprobs | None = None
    text: str = ""


@dataclass(frozen=True)
class Piece:
    """The tokens of one pass and the text that became final. Either may be empty. written:
    `time.perf_counter` at its end."""

    text: str
    tokens: tuple[Token, ...]
    written: float = field(default_factory=time.perf_counter, compare=False)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


@dataclass(frozen=True)
class End:
    """stop: the token id or stop string that ended the text. error: raised in the reader."""

    reason: FinishReason
    stop: int | str | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Request:
    """prompt_ids: the same tuple object shares K/V. plan: None chooses the fastest.
    lookahead_drafts, ngram_drafts: the most in a pass. reuse_prefix: even if bits of the results
    change. logprobs, prompt_logprobs: how many likely tokens to report; None reports nothing."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    plan_name: str
    plan: Plan | None
    lookahead_drafts: int
    ngram_drafts: int
    stop_token_ids: frozenset[int]
    stop: tuple[str, ...] = ()
    reuse_prefix: bool = False
    cache_salt: str = ""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    processing: Processing | None = None
    shown_special_tokens: tuple[int, ...] = ()


@dataclass(eq=False)
class SequenceState:
    """A request that waits, decodes or has ended. Its reader gets `events`.

    tokens: prompt and text; the last one, the root, has no K/V yet. cached: tokens with K/V.
    prompt_logprobs: None for the first token. on_event: called on the thread that decodes.
    ended: set after the last event. admission: the order in which sequences got slots, from 1; 0
    in the queue. rates: acceptance in this text; None until needed. processors_error: ends the
    sequence after the next pass.
    """

    request: Request
    text_reader: TextStream | None = None
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    cancelled: bool = False
    finished: End | None = None
    events: queue.SimpleQueue[Piece | End] = field(default_factory=queue.SimpleQueue)
    ended: threading.Event = field(default_factory=threading.Event)
    on_event: Callable[[], None] | None = None
    admission: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    rates: Rates | None = None
    processors: Processors | None = None
    processors_error: Exception | None = None

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = list(request.prompt_ids)
        self.sampler: Sampler = request.sampling.sampler
        if request.processing is not None:
            self.processors = Processors(request.processing, request.prompt_ids)
        self.copies = CopyIndex(request.prompt_ids) if request.ngram_drafts else None
        self.stats = Stats(
            plan=request.plan_name,
            lookahead=max(request.lookahead_drafts, request.ngram_drafts),
            prompt_tokens=len(request.prompt_ids),
        )

    def propose(self) -> Drafts | None:
        """Return the drafts that a grammar forces, else n-gram drafts."""
        request = self.request
        if self.processors is not None and self.processors_error is None:
            with self._keeping_errors():
                self.processors.read(self.tokens)
                forced = self.processors.forced()
                if forced := forced[: max(request.lookahead_drafts, request.ngram_drafts)]:
                    return Drafts(forced, "grammar")
        return None if self.copies is None else self.copies.propose(request.ngram_drafts)

    def list_size(self, drafts: int) -> int:
        """Return T for `drafts` drafts."""
        assert self.processors is not None
        with self._keeping_errors():
            self.processors.read(self.tokens)
        return self.processors.list_size(drafts)

    def processor_rows(self, drafts: Sequence[int], size: int) -> ProcessedRows | None:
        """drafts: the id V is no draft. size: T. None without processors or after their error."""
        if self.processors is not None and self.processors_error is None:
            with self._keeping_errors():
                return self.processors.rows(self.tokens, drafts, size)
        return None

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except PassError as error:
            self.processors_error = self.processors_error or error

    def write(self, tokens: Sequence[Token]) -> None:
        """Append a pass's tokens up to a stop or the limit, which ends the sequence."""
        request, kept = self.request, list[Token]()
        room = request.max_new_tokens - len(self.tokens) + len(request.prompt_ids)
        end: End | None = None
        for token in tokens:
            text, stop = ("", None) if self.text_reader is None else self.text_reader.read(token.id)
            kept.append(Token(token.id, token.source, token.logprobs, text) if text else token)
            if token.id in request.stop_token_ids:
                end = End("stop", token.id)
            elif stop is not None:
                end = End("stop", stop)
            elif len(kept) == room:
                end = End("length")
            if end is not None:
                break
        ids = [token.id for token in kept]
        self.tokens += ids
        if self.copies is not None:
            self.copies.extend(ids)
        self.stats.wrote(len(self.tokens) - len(request.prompt_ids))
        self._put(Piece("".join(token.text for token in kept), tuple(kept)))
        if end is not None:
            self.finish(end)

    def finish(self, end: End) -> None:
        if self.finished is not None:
            return
        if not self.admission:
            self.stats.queue_seconds = time.perf_counter() - self.submitted
        self.finished = end
        reader = None if isinstance(end.stop, str) else self.text_reader
        if reader is not None and (rest := reader.flush()):
            self._put(Piece(rest, ()))
        self._put(end)
        self.ended.set()

    def _put(self, event: Piece | End) -> None:
        self.events.put(event)
        if self.on_event is not None:
            self.on_event()
