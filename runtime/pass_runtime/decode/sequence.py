"""A request's state: what was asked for, what is written, and where its reader gets it from."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pass_runtime.bundle.plan import Cycle
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.decode.ngram import NgramIndex
from pass_runtime.decode.stats import Stats
from pass_runtime.tuning.acceptance import Acceptance

FinishReason = Literal["stop", "length", "cancelled", "error"]
Source = Literal["model", "lookahead", "ngram"]
"""Where a token came from: the model's own choice, or a draft that was one."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one token, by the model before temperature and truncation: its own, and those of the most likely ones."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Token:
    """One written token. text: what became final with it ("" where nobody asked for text)."""

    id: int
    source: Source
    logprobs: TokenLogprobs | None = None
    text: str = ""


@dataclass(frozen=True)
class Chunk:
    """The tokens of one pass, and the text that is final with them ("" where nobody asked for text)."""

    tokens: tuple[Token, ...]
    text: str = ""
    written: float = field(default_factory=time.perf_counter, compare=False)
    """`time.perf_counter` behind the pass."""


@dataclass(frozen=True)
class End:
    """The last thing a reader gets. `error` is what to raise, where there is something."""

    reason: FinishReason
    stop: int | str | None = None
    error: Exception | None = None


class TextReader(Protocol):
    """Turns tokens into text and finds stop strings (`pass_runtime.text.stream.TextStream`)."""

    def read(self, token: int) -> tuple[str, str | None]:
        """-> (text that is final now, the stop string that ended it)."""

    def flush(self) -> str:
        """What was held back, once no more tokens come."""


@dataclass(frozen=True)
class Request:
    """What to generate; it never changes.

    prompt_ids: requests that have the very same tuple share what is read of it.
    cycle: the passes to decode with, None for whatever is fastest. lookahead: the most look-ahead drafts of a pass.
    text_drafts: the most drafts from the text. logprobs: how many of the most likely tokens to tell, None for none.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    cycle: Cycle | None
    lookahead: int
    text_drafts: int
    stop_token_ids: frozenset[int]
    reuse_prefix: bool = False
    logprobs: int | None = None
    name: str = "ar"


@dataclass(eq=False)
class Sequence:
    """A request under way. The runner counts `cached`; everything a reader may know goes through `events`."""

    request: Request
    reader: TextReader | None = None
    tokens: list[int] = field(default_factory=list)
    """Prompt and what was written; the last one is the root, which is not in the cache."""
    cached: int = 0
    """Entries of the KV cache that are this sequence's."""
    cancelled: bool = False
    finished: End | None = None
    events: queue.SimpleQueue[Chunk | End] = field(default_factory=queue.SimpleQueue)
    ended: threading.Event = field(default_factory=threading.Event)
    """Set behind the last event, for a reader that waits for nothing else: waking it costs the next pass time."""
    on_event: Callable[[], None] | None = None
    """Called behind every event, from the thread that decodes."""
    index: NgramIndex | None = None
    queued: bool = True
    submitted: float = field(default_factory=time.perf_counter)
    decoding_since: float | None = None
    """`time.perf_counter` where the first pass began."""
    engine_before: float = 0.0
    """Seconds that the engine had run by then, for all sequences before."""
    acceptance: Acceptance | None = None
    """How well look-ahead drafts do in this sequence; None until `auto` asks."""

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = list(request.prompt_ids)
        if request.text_drafts:
            self.index = NgramIndex(request.prompt_ids)
        self.stats = Stats(
            plan=request.name,
            lookahead=max(request.lookahead, request.text_drafts),
            prompt_tokens=len(request.prompt_ids),
        )

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt but its last token is in the cache."""
        return self.cached == len(self.tokens) - 1

    @property
    def written(self) -> int:
        """Tokens written so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    def leave_queue(self) -> None:
        """It has a slot, or needs none any more."""
        if self.queued:
            self.queued, self.stats.queue_seconds = False, time.perf_counter() - self.submitted

    def write(self, tokens: Items[Token]) -> None:
        """The tokens of a pass: up to a stop or the limit they are the sequence's, then it has ended."""
        kept: list[Token] = []
        end: End | None = None
        for token in tokens:
            text, stop = ("", None) if self.reader is None else self.reader.read(token.id)
            kept.append(Token(token.id, token.source, token.logprobs, text) if text else token)
            if token.id in self.request.stop_token_ids:
                end = End("stop", token.id)
            elif stop is not None:
                end = End("stop", stop)
            elif self.written + len(kept) == self.request.max_new_tokens:
                end = End("length")
            if end is not None:
                break
        self.tokens += [token.id for token in kept]
        if self.index is not None:
            self.index.extend(token.id for token in kept)
        self.stats.generated_tokens = self.written
        if self.decoding_since is not None:
            self.stats.decode_seconds = time.perf_counter() - self.decoding_since
        self._tell(Chunk(tuple(kept), "".join(token.text for token in kept)))
        if end is not None:
            self.finish(end)

    def finish(self, end: End) -> None:
        """Nothing comes after this, but for text that might have become a stop string."""
        if self.finished is not None:
            return
        self.leave_queue()
        self.finished = end
        if self.reader is not None and not isinstance(end.stop, str) and (rest := self.reader.flush()):
            self._tell(Chunk((), rest))
        self._tell(end)
        self.ended.set()

    def _tell(self, event: Chunk | End) -> None:
        self.events.put(event)
        if self.on_event is not None:
            self.on_event()
