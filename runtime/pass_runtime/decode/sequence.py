"""A request and its state: the tokens so far, and the queue from which its reader takes pieces."""

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
from pass_runtime.tuning.acceptance import ConditionalAcceptance

FinishReason = Literal["stop", "length", "cancelled", "error"]
TokenSource = Literal["model", "lookahead", "ngram"]
"""Where a token came from: the model chose it in a pass of its own, or it was an accepted draft."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, before temperature and truncation: of the token written, and of the likeliest
    ones as pairs (id, log-probability)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Token:
    """One written token. text: the text that became final with it ("" for a request without text)."""

    id: int
    source: TokenSource
    logprobs: TokenLogprobs | None = None
    text: str = ""


@dataclass(frozen=True)
class Piece:
    """The tokens of one pass and the text that became final with them; either may be empty."""

    text: str
    tokens: tuple[Token, ...]
    written: float = field(default_factory=time.perf_counter, compare=False)
    """`time.perf_counter` at the end of the pass."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


@dataclass(frozen=True)
class End:
    """The last event of a sequence. stop: the token or string that ended it. error: what its reader raises."""

    reason: FinishReason
    stop: int | str | None = None
    error: Exception | None = None


class TextReader(Protocol):
    """Turns tokens into text and finds stop strings (`pass_runtime.text.stream.TextStream`)."""

    def read(self, token: int) -> tuple[str, str | None]:
        """-> (the text that became final with `token`, the stop string that ended the text or None)."""

    def flush(self) -> str:
        """The text held back as a possible stop string, once no more tokens come."""


@dataclass(frozen=True)
class Request:
    """What to generate; it never changes.

    prompt_ids: requests that hold the very same tuple object share its K/V.
    cycle: the plans to decode with; None for whatever is fastest. lookahead: the most look-ahead drafts of a pass.
    ngram_drafts: the most n-gram drafts of a pass. logprobs: how many of the likeliest tokens to report with each
    token; None reports no log-probabilities. name: the mode as statistics call it.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    cycle: Cycle | None
    lookahead: int
    ngram_drafts: int
    stop_token_ids: frozenset[int]
    reuse_prefix: bool = False
    logprobs: int | None = None
    name: str = "ar"


@dataclass(eq=False)
class Sequence:
    """A request under way. The runner counts `cached`; a reader learns of progress through `events` alone."""

    request: Request
    reader: TextReader | None = None
    tokens: list[int] = field(default_factory=list)
    """The prompt, then what was written. The last one is the root, whose K/V are not cached yet."""
    cached: int = 0
    """KV entries of this sequence."""
    cancelled: bool = False
    finished: End | None = None
    events: queue.SimpleQueue[Piece | End] = field(default_factory=queue.SimpleQueue)
    ended: threading.Event = field(default_factory=threading.Event)
    """Set after the last event. A reader that only wants the end waits for this: waking it at every event would slow
    the passes down."""
    on_event: Callable[[], None] | None = None
    """Called after every event, from the thread that decodes."""
    index: NgramIndex | None = None
    queued: bool = True
    submitted: float = field(default_factory=time.perf_counter)
    decoding_since: float | None = None
    """`time.perf_counter` when the first pass over it began."""
    engine_before: float = 0.0
    """Seconds that the engine had spent in passes of all sequences by then."""
    acceptance: ConditionalAcceptance | None = None
    """How often look-ahead drafts are accepted in this sequence; None until `auto` needs it."""

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = list(request.prompt_ids)
        if request.ngram_drafts:
            self.index = NgramIndex(request.prompt_ids)
        self.stats = Stats(
            plan=request.name,
            lookahead=max(request.lookahead, request.ngram_drafts),
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
        """Record the time it waited: it now has a slot, or has ended without one."""
        if self.queued:
            self.queued, self.stats.queue_seconds = False, time.perf_counter() - self.submitted

    def write(self, tokens: Items[Token]) -> None:
        """Append the tokens of a pass, up to a stop or the limit, where the sequence ends."""
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
        self._put(Piece("".join(token.text for token in kept), tuple(kept)))
        if end is not None:
            self.finish(end)

    def finish(self, end: End) -> None:
        """End the sequence. Text that was held back as a possible stop string comes before the last event."""
        if self.finished is not None:
            return
        self.leave_queue()
        self.finished = end
        if self.reader is not None and not isinstance(end.stop, str) and (rest := self.reader.flush()):
            self._put(Piece(rest, ()))
        self._put(end)
        self.ended.set()

    def _put(self, event: Piece | End) -> None:
        self.events.put(event)
        if self.on_event is not None:
            self.on_event()
