"""A request and its state while it waits and decodes (`SequenceState`), the slots in which
sequences decode, and the n-gram drafts that a text proposes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pass_runtime.backends.base import ProcessedRows
from pass_runtime.bundle.plan import Cycle
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.decode.processors import Processing, Processors
from pass_runtime.decode.stats import Stats
from pass_runtime.errors import PassError
from pass_runtime.tuning.estimates import FORCED_MATCH, ConditionalAcceptance

FinishReason = Literal["stop", "length", "cancelled", "error"]
TokenSource = Literal["model", "lookahead", "ngram", "grammar"]
"""What proposed a token: the model alone (a bonus token), or what made an accepted draft."""
MAX_GRAM_TOKENS, MIN_GRAM_TOKENS = 4, 2
"""The lengths of the n-grams that are indexed. The longest one that matches is used."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, before temperature and truncation.

    logprob: that of the token written, or of the prompt's token there. top: the likeliest tokens,
    as pairs (id, log-probability).
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Token:
    """One written token. text: the text that it made final; "" if the request wants no text."""

    id: int
    source: TokenSource
    logprobs: TokenLogprobs | None = None
    text: str = ""


@dataclass(frozen=True)
class Piece:
    """The tokens of one pass and the text that became final with them. Either may be empty."""

    text: str
    tokens: tuple[Token, ...]
    written: float = field(default_factory=time.perf_counter, compare=False)
    """`time.perf_counter` at the end of the pass."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


@dataclass(frozen=True)
class End:
    """The last event of a sequence. stop: the token id or stop string that ended the text, if one
    did. error: the exception that the reader raises."""

    reason: FinishReason
    stop: int | str | None = None
    error: Exception | None = None


class TextReader(Protocol):
    """Turns tokens into text and finds stop strings (`text.detokenizer.TextStream`)."""

    def read(self, token: int) -> tuple[str, str | None]:
        """Return the text that is final with `token`, and the stop string that ends it or None."""

    def flush(self) -> str:
        """Return the text that was held back as a possible stop string, after the last token."""


@dataclass(frozen=True)
class Request:
    """What to generate, and how. It never changes.

    prompt_ids: the prompt. Requests with the same tuple object share its K/V. mode: the name of the
    plan in statistics. cycle: the plans with which to decode; None chooses the fastest.
    lookahead_drafts, ngram_drafts: the most drafts of each kind in a pass. stop_token_ids, stop:
    tokens and strings that end the text. reuse_prefix: whether K/V of other requests may be used
    even if that can change bits of the results. cache_salt: only requests with the same salt share
    K/V. logprobs: how many of the likeliest tokens to report with each token; None reports no
    log-probabilities. prompt_logprobs: the same for the prompt's own tokens. processing: what
    logits processors do; None if there are none. shown_special_tokens: ids of special tokens that
    are shown in the text.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    mode: str
    cycle: Cycle | None
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
    """A request that waits, decodes or has ended. Its reader gets text and end from `events`."""

    request: Request
    text_reader: TextReader | None = None
    tokens: list[int] = field(default_factory=list)
    """Prompt and text. The last token is the root, whose K/V are not cached yet."""
    cached: int = 0
    """How many of the tokens have K/V in the cache."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    """Those of the prompt's tokens so far; None for the first token, which follows none."""
    cancelled: bool = False
    finished: End | None = None
    events: queue.SimpleQueue[Piece | End] = field(default_factory=queue.SimpleQueue)
    ended: threading.Event = field(default_factory=threading.Event)
    """Set after the last event. Readers that wait for the end alone are not woken by each event."""
    on_event: Callable[[], None] | None = None
    """Called after every event, from the thread that decodes."""
    ngram_index: NgramIndex | None = None
    queued: bool = True
    """Whether it still waits for a slot."""
    admission_number: int = 0
    """1 for the first sequence that got a slot, 2 for the next, ..."""
    submitted: float = field(default_factory=time.perf_counter)
    """`time.perf_counter` when it was made."""
    decoding_since: float | None = None
    """`time.perf_counter` at the start of its first pass."""
    engine_seconds_before: float = 0.0
    """How long the backend had run passes and prefill before the first pass of this sequence."""
    lookahead_acceptance: ConditionalAcceptance | None = None
    """How often look-ahead drafts are accepted in this sequence; None until `auto` needs it."""
    ngram_acceptance: dict[int, ConditionalAcceptance] = field(default_factory=dict)
    """How often n-gram drafts are accepted in this sequence, by the length of the match."""
    processors: Processors | None = None
    processors_error: Exception | None = None
    """The error of its processors, if they failed. The sequence then ends after the next pass."""

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = list(request.prompt_ids)
        if request.processing is not None:
            self.processors = Processors(request.processing, request.prompt_ids)
        if request.ngram_drafts:
            self.ngram_index = NgramIndex(request.prompt_ids)
        self.stats = Stats(
            plan=request.mode,
            lookahead=max(request.lookahead_drafts, request.ngram_drafts),
            prompt_tokens=len(request.prompt_ids),
        )

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt but its last token is in the cache."""
        return self.cached == len(self.tokens) - 1

    @property
    def written(self) -> int:
        """How many tokens were written so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that a grammar forces next; () if there are none."""
        if self.processors is not None and self.processors_error is None:
            with self._keeping_errors():
                self.processors.read(self.tokens)
                return self.processors.forced()
        return ()

    def list_size(self, drafts: int) -> int:
        """Return T, the size of the processors' lists, for so many drafts; 0 without processors."""
        if self.processors is None:
            return 0
        with self._keeping_errors():
            self.processors.read(self.tokens)
        return self.processors.list_size(drafts)

    def processor_rows(self, drafts: Sequence[int], size: int) -> ProcessedRows | None:
        """Return what the processors do in a window with these drafts (the id V is no draft); None
        without processors or after their error. size: the size of their lists, T."""
        if self.processors is not None and self.processors_error is None:
            with self._keeping_errors():
                return self.processors.rows(self.tokens, drafts, size)
        return None

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        """Keep a block's error in `processors_error`, so that it ends this sequence alone."""
        try:
            yield
        except PassError as error:
            self.processors_error = self.processors_error or error

    def leave_queue(self) -> None:
        """Record how long the sequence waited until it got a slot, or ended without a slot."""
        if self.queued:
            self.queued, self.stats.queue_seconds = False, time.perf_counter() - self.submitted

    def write(self, tokens: Sequence[Token]) -> None:
        """Append the tokens of a pass up to a stop or the limit, which ends the sequence."""
        kept: list[Token] = []
        end: End | None = None
        for token in tokens:
            text, stop = ("", None) if self.text_reader is None else self.text_reader.read(token.id)
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
        if self.ngram_index is not None:
            self.ngram_index.extend(token.id for token in kept)
        self.stats.generated_tokens = self.written
        if self.decoding_since is not None:
            self.stats.decode_seconds = time.perf_counter() - self.decoding_since
        self._put(Piece("".join(token.text for token in kept), tuple(kept)))
        if end is not None:
            self.finish(end)

    def finish(self, end: End) -> None:
        """End the sequence. First show the text that was held back as a possible stop string,
        unless a stop string ends the sequence."""
        if self.finished is not None:
            return
        self.leave_queue()
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


@dataclass
class Slot:
    """A sequence's slot, or a free slot with what its last sequence left.

    kept: in a free slot, the tokens whose K/V are still in the cache. prompt, salt: those of the
    present or last sequence; the cache begins with the K/V of this prompt. exact_prefix_len: how
    many of the first K/V entries are bit-identical to a prefill's (more than `cached` after tokens
    were dropped). num_drafts, source: how many drafts its window has, and what proposed them.
    staged: whether its window is on the device. masked: whether the device leaves the slot out of
    passes. ngram: drafts for the next pass, from an n-gram match (of match_length tokens) or a
    grammar (match_length is FORCED_MATCH).
    """

    number: int
    sequence: SequenceState | None = None
    kept: list[int] = field(default_factory=list)
    prompt: tuple[int, ...] = ()
    salt: str = ""
    exact_prefix_len: int = 0
    num_drafts: int = 0
    source: TokenSource = "lookahead"
    staged: bool = False
    masked: bool = False
    ngram: tuple[int, ...] = ()
    match_length: int = 0

    @property
    def current(self) -> SequenceState:
        """The sequence of a slot that must have one."""
        assert self.sequence is not None
        return self.sequence

    @property
    def held(self) -> Sequence[int]:
        """The tokens in the slot whose K/V are in the cache."""
        return self.kept if self.sequence is None else self.sequence.tokens[: self.sequence.cached]

    @property
    def cached(self) -> int:
        """How many tokens `held` has."""
        return len(self.kept) if self.sequence is None else self.sequence.cached

    def propose(self, *, ngrams: bool) -> None:
        """Set `ngram` and `match_length` for the next pass. ngrams: whether it may have drafts."""
        self.ngram, self.match_length = (), 0
        if not ngrams or (sequence := self.sequence) is None:
            return
        request = sequence.request
        if sequence.processors is not None and (forced := sequence.forced()):
            self.ngram = forced[: max(request.lookahead_drafts, request.ngram_drafts)]
            self.match_length = FORCED_MATCH
        if not self.ngram and sequence.ngram_index is not None:
            self.ngram = sequence.ngram_index.propose(request.ngram_drafts)
            self.match_length = sequence.ngram_index.match_length

    @property
    def proposed_by(self) -> TokenSource:
        """What proposed the drafts in `ngram`."""
        return "grammar" if self.match_length == FORCED_MATCH else "ngram"


class NgramIndex:
    """Proposes n-gram drafts (prompt lookup): what followed the newest earlier occurrence of the
    last tokens. It indexes all n-grams of a growing sequence of tokens."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        # by n-gram, the index of the token after its newest occurrence
        self._following: dict[tuple[int, ...], int] = {}
        self._match = 0  # the index of the token after the match; 0 if there is none
        self.match_length = 0
        """How many of the last tokens the match has; 0 if there is none."""
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append `tokens`."""
        for token in tokens:
            self._tokens.append(token)
            self._index_end()

    def _index_end(self) -> None:
        """Find an earlier occurrence of the last tokens, then index the n-grams that end here."""
        end = len(self._tokens)
        self._match = self.match_length = 0
        for size in range(min(MAX_GRAM_TOKENS, end), MIN_GRAM_TOKENS - 1, -1):
            gram = tuple(self._tokens[-size:])
            if not self._match and gram in self._following:
                self._match, self.match_length = self._following[gram], size
            self._following[gram] = end

    def propose(self, count: int) -> tuple[int, ...]:
        """Return the `count` tokens that followed the match; () without a match. If fewer follow
        it, they are repeated, as in a text that loops."""
        if not self._match or count < 1:
            return ()
        period = len(self._tokens) - self._match
        return tuple(self._tokens[self._match + i % period] for i in range(count))
