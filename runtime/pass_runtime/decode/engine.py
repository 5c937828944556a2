"""Continuous batching: which sequences get slots, whose prompts are read, and which pass runs."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pass_runtime.backends.base import Backend, Batch, Logprobs, LogprobsMode, PassResult
from pass_runtime.backends.memory import out_of_memory
from pass_runtime.bundle.plan import make_plan, plan_windows
from pass_runtime.bundle.sampling import SAMPLERS, Sampler
from pass_runtime.bundle.window import Window
from pass_runtime.decode.next_pass import Proposed, Situation
from pass_runtime.decode.prefix_cache import (
    PrefixStore,
    SavedPrefix,
    common_prefix,
    rounded_to_blocks,
)
from pass_runtime.decode.processors import no_processing
from pass_runtime.decode.sequence import (
    End,
    Request,
    SequenceState,
    Token,
    TokenLogprobs,
    TokenSource,
)
from pass_runtime.errors import PassError
from pass_runtime.tuning.auto import Auto, Rates, Tuner, Verified

log = logging.getLogger("pass_runtime.backends")

MAX_PROMPT_TOKENS = 64
"""While sequences decode, a step reads about so many prompt tokens, in chunks of at most so many
rows."""
RUNS_UNTIL_CAPTURED = 2
"""An engine captures a pass after so many runs."""


class QueueFull(PassError):
    """reason: the message without advice."""

    def __init__(self, waiting: int, max_queue: int, count: int) -> None:
        self.reason = (
            f"{waiting} requests are waiting already, and the queue holds {max_queue}: no room "
            f"for {count} more"
        )
        super().__init__(
            f"{self.reason}; try again later, or open the session with a larger max_queue"
        )


@dataclass(frozen=True)
class Usage:
    """running, waiting: sequences in slots and queue. cached: tokens of running sequences with
    K/V. capacity: of all slots together, in tokens. graphs_not_captured: graphs or passes that
    are slow for lack of a CUDA graph."""

    running: int
    waiting: int
    slots: int
    cached: int
    capacity: int
    graphs_not_captured: int = 0
    kernels: str = ""

    @property
    def cache_share(self) -> float:
        """The part of the KV capacity in use, 0 to 1."""
        return self.cached / self.capacity


class SlotState(Enum):
    FREE = "no sequence"
    READING = "a part of the prompt is not in the cache"
    STALE = "the window must be written to the device"
    STAGED = "the device has the window"


FREE, READING, STALE, STAGED = SlotState


@dataclass
class Slot:
    """kept: in a free slot, the tokens with K/V in the cache. prompt, salt: of the present or
    last sequence. masked_at: the length with which passes leave the slot out, or None."""

    number: int
    state: SlotState = FREE
    sequence: SequenceState | None = None
    kept: list[int] = field(default_factory=list)
    prompt: tuple[int, ...] = ()
    salt: str = ""
    num_drafts: int = 0
    masked_at: int | None = None

    @property
    def cached(self) -> int:
        return len(self.kept) if self.sequence is None else self.sequence.cached

    @property
    def held(self) -> Sequence[int]:
        return self.kept if self.sequence is None else self.sequence.tokens[: self.sequence.cached]


Running = tuple[Slot, SequenceState]


class Engine:
    """The slots of one backend and the queue. Callers on any thread use `usage`, and, one at a
    time, `add`, `reserve` and `release`. The thread that decodes calls the rest."""

    def __init__(
        self,
        backend: Backend,
        auto: Auto,
        max_queue: int = 0,
        *,
        speculative_max_concurrency: int | None = None,
        logprobs_mode: LogprobsMode = "raw",
        prefix_cache: bool = True,
    ) -> None:
        """The options are those of `LoadOptions`."""
        self.backend, self.auto = backend, auto
        self.capabilities = backend.capabilities
        self.slots = [Slot(number) for number in range(backend.capabilities.slots)]
        self.waiting: deque[SequenceState] = deque()
        self._max_queue, self._reserved = max_queue, 0
        # sequences that run, wait, or have a reader
        self._added = weakref.WeakSet[SequenceState]()
        self._max_drafting = speculative_max_concurrency
        self._logprobs_mode = logprobs_mode
        has_store = prefix_cache and backend.capabilities.same_entries
        self._store = PrefixStore(backend.cache, backend.memory) if has_store else None
        self._staged: Window | None = None  # of STAGED slots; None stages all again
        self._sampler: Sampler = "greedy"  # of the last pass
        self._admitted = 0
        self._engine_seconds = 0.0

    # The callers' side.

    @property
    def idle(self) -> bool:
        return not self.waiting and all(slot.sequence is None for slot in self.slots)

    def add(self, *sequences: SequenceState) -> None:
        """Queue sequences in reserved places."""
        self._added.update(sequences)
        self.waiting += sequences
        self.release(len(sequences))

    def reserve(self, count: int, max_queue: int | None = None) -> None:
        """Reserve places until `add` uses or `release` frees them: one a slot, and `max_queue`
        more (None: the session's). Raises QueueFull if fewer are free."""
        taken = sum(sequence.finished is None for sequence in self._added) + self._reserved
        limit = self._max_queue if max_queue is None else max_queue
        if taken + count > len(self.slots) + limit:
            raise QueueFull(max(taken - len(self.slots), 0), limit, count)
        self._reserved += count

    def release(self, count: int) -> None:
        self._reserved -= count

    def usage(self) -> Usage:
        """Another thread may be changing it."""
        running = [slot.sequence for slot in self.slots]
        cached = [sequence.cached for sequence in running if sequence is not None]
        return Usage(
            len(cached),
            len(self.waiting),
            len(self.slots),
            sum(cached),
            len(self.slots) * self.capabilities.max_capacity,
            len(self.backend.uncaptured),
            self.capabilities.kernels,
        )

    # A step.

    def step(self) -> None:
        """End cancelled sequences, admit waiting ones, read prompts, and run one pass."""
        self._end_cancelled()
        if self.waiting:
            self.admit()
        if any(slot.state is READING for slot in self.slots):
            self.read_prompts()
        decoding = self._running(STALE, STAGED)
        if not decoding:
            return
        sequences = [sequence for _, sequence in decoding]
        try:
            if decoding[-1][0].number >= len(decoding):
                decoding = self._compact(decoding)
            batch, tuner = self._build(decoding)
            if batch is None:
                self._end_longest(decoding, End("length"))
            elif self._fit(batch, decoding):
                self._stage(batch, decoding)
                result, seconds = self._run(batch, decoding)
                self._apply(batch, result, decoding, seconds, tuner)
        except Exception as error:  # A pass fails for all sequences in it.
            for slot, sequence in self._running():
                if sequence in sequences:
                    self._end(slot, sequence, _error_end(error))

    def end_all(self, end: End) -> None:
        """End all sequences, waiting ones too."""
        for slot, sequence in self._running():
            self._end(slot, sequence, end)
        while self.waiting:
            self.waiting.popleft().finish(end)

    def _running(self, *states: SlotState) -> list[Running]:
        return [
            (slot, slot.sequence)
            for slot in self.slots
            if slot.sequence is not None and (not states or slot.state in states)
        ]

    def _end_cancelled(self) -> None:
        for slot in self.slots:
            if (sequence := slot.sequence) is not None and sequence.cancelled:
                self._end(slot, sequence, End("cancelled"))
        for sequence in self.waiting.copy():  # Other threads may add sequences meanwhile.
            if sequence.cancelled:
                self.waiting.remove(sequence)
                sequence.finish(End("cancelled"))

    def _end(self, slot: Slot, sequence: SequenceState, end: End) -> None:
        slot.sequence, slot.state = None, FREE
        slot.kept = sequence.tokens[: sequence.cached]
        sequence.finish(end)

    def _end_longest(self, decoding: Sequence[Running], end: End) -> None:
        slot, sequence = max(decoding, key=lambda running: running[1].cached)
        self._end(slot, sequence, end)

    # Slots and prompts.

    def admit(self) -> None:
        """Give waiting sequences the free slots with the most K/V of their prompts."""
        while self.waiting:
            sequence = self.waiting[0]
            root_at = len(sequence.request.prompt_ids) - 1
            if root_at + self.capabilities.padded_width(1) > self.capabilities.max_capacity:
                sequence.finish(End("length"))
            else:
                free = [slot for slot in self.slots if slot.sequence is None]
                if not free:
                    return
                try:
                    self._admit_to(free, sequence)
                except Exception as error:
                    sequence.finish(_error_end(error))
            self.waiting.popleft()

    def _admit_to(self, free: Sequence[Slot], sequence: SequenceState) -> None:
        request = sequence.request
        reusable = {slot.number: self._reusable(slot, request) for slot in free}
        # Of equal slots, take the least loss of K/V, then the first.
        slot = max(free, key=lambda slot: (reusable[slot.number], -len(slot.kept), -slot.number))
        reused = reusable[slot.number]
        self._shrink(len(request.prompt_ids) + 1, slot, reused)
        self.backend.set_sampling(slot.number, request.sampling)
        slot.sequence, slot.state, slot.kept = sequence, READING, []
        slot.prompt, slot.salt, slot.num_drafts = request.prompt_ids, request.cache_salt, 0
        self._admitted += 1
        sequence.admission, sequence.cached = self._admitted, reused
        sequence.stats.cached_tokens = reused
        sequence.stats.queue_seconds = time.perf_counter() - sequence.submitted
        self._end_reading(slot, sequence)

    def read_prompts(self) -> None:
        """Read the oldest sequences' prompts first: about MAX_PROMPT_TOKENS tokens while
        sequences decode, else one chunk of any width."""
        limit = MAX_PROMPT_TOKENS if self._running(STALE, STAGED) else None
        read = 0
        for slot, sequence in sorted(self._running(READING), key=_admission):
            try:
                # An older sequence may have read the same prompt by now.
                self._share(slot, sequence)
                while slot.state is READING:
                    if read and (limit is None or read >= limit):
                        return  # so that the next step can admit and cancel sequences
                    read += self._read(slot, sequence, limit)
            except Exception as error:
                self._end(slot, sequence, _error_end(error))

    def _end_reading(self, slot: Slot, sequence: SequenceState) -> None:
        if sequence.cached == len(sequence.tokens) - 1:
            slot.state = STALE
            if sequence.request.max_new_tokens == 0:
                self._end(slot, sequence, End("length"))

    def _share(self, slot: Slot, sequence: SequenceState) -> None:
        started = time.perf_counter()
        others = [other for other in self.slots if other is not slot]
        reusable = [self._reusable(other, sequence.request) for other in others]
        count = max(reusable, default=0)
        saved, saved_count = self._saved_prefix(sequence.request)
        if max(count, saved_count) <= sequence.cached:
            return
        if self._store and saved and saved_count > count:
            self._reserve_capacity(saved_count)
            self._store.load(saved, slot.number, saved_count)
            count = saved_count
        else:
            source = others[reusable.index(count)]
            self.backend.cache.copy_slot(source.number, slot.number, count)
        sequence.stats.cached_tokens += count - sequence.cached
        sequence.cached = count
        sequence.stats.prefill_seconds += time.perf_counter() - started
        self._end_reading(slot, sequence)

    def _reusable(self, slot: Slot, request: Request) -> int:
        """Return how many tokens of its prompt `request` may use in `slot`. The same prompt
        object shares all; others share whole blocks, and only with a prefix store or
        `reuse_prefix`. Log-probabilities of a prompt need all of it read."""
        if slot.salt != request.cache_salt or request.prompt_logprobs is not None:
            return 0
        if slot.prompt is request.prompt_ids:
            return min(slot.cached, len(request.prompt_ids) - 1)
        if not self._store and not request.reuse_prefix:
            return 0
        return rounded_to_blocks(common_prefix(slot.held, request.prompt_ids[:-1]))

    def _saved_prefix(self, request: Request) -> tuple[SavedPrefix | None, int]:
        if not self._store or request.prompt_logprobs is not None:
            return None, 0
        saved, count = self._store.match(request.prompt_ids[:-1], request.cache_salt)
        return saved, rounded_to_blocks(count)

    def _read(self, slot: Slot, sequence: SequenceState, max_rows: int | None) -> int:
        started = time.perf_counter()
        prompt, top = sequence.request.prompt_ids, sequence.request.prompt_logprobs
        begin = sequence.cached
        count, width = self._chunk(begin, len(prompt) - 1, max_rows, scored=top is not None)
        following = prompt[begin + 1 : begin + count + 1] if top is not None else ()
        self._reserve_capacity(begin + self.capabilities.padded_width(width))
        engine_started = time.perf_counter()
        chunk = prompt[begin : begin + count]
        logprobs = self.backend.prefill(slot.number, begin, chunk, width, following)
        ended = time.perf_counter()
        self._engine_seconds += ended - engine_started
        sequence.prompt_logprobs += _logprobs(logprobs, 0, following, top)
        sequence.cached += count
        sequence.stats.prefill_seconds += ended - started
        self._end_reading(slot, sequence)
        return count

    def _chunk(
        self, start: int, stop: int, max_rows: int | None, *, scored: bool
    ) -> tuple[int, int]:
        """Return the tokens of the next prompt chunk, and its window's rows. start, stop: the
        part that is left.

        It takes the widest window that the rest fills. A wider window takes the whole rest if
        that fills three quarters of it, or if narrower ones have one row: padding takes less
        time than more chunks.
        """
        remaining = stop - start
        offered = self.capabilities.chunks(start, self.backend.capacity, scored=scored)
        widths = [each for each in offered if max_rows is None or each <= max_rows] or offered[-1:]
        fitting = [width for width in widths if width >= remaining]
        filled = [width for width in widths if width <= remaining]
        if fitting and (4 * remaining >= 3 * fitting[-1] or filled[0] == 1):
            return remaining, fitting[-1]
        return filled[0], filled[0]

    # The KV cache.

    @property
    def room(self) -> int:
        """How many tokens fit after the longest sequence, at the largest KV capacity."""
        longest = max((sequence.cached for _, sequence in self._running()), default=0)
        return self.capabilities.max_capacity - longest

    def _reserve_capacity(self, tokens: int) -> None:
        if tokens > self.backend.capacity:
            self.resize(self.capabilities.capacity(tokens))

    def resize(self, capacity: int) -> None:
        self.backend.resize(capacity, [slot.cached for slot in self.slots])

    def _shrink(self, tokens: int, slot: Slot, reused: int) -> None:
        """Shrink a KV cache that is longer than needed, as its length costs time in every pass.
        Free slots drop tokens that no longer fit. tokens: the length, with the next token, of a
        sequence that joins in `slot` and reuses `reused` tokens."""
        self._keep(slot, slot.kept[:reused])
        longest = max((len(sequence.tokens) + 1 for _, sequence in self._running()), default=0)
        needed = min(max(tokens, longest), self.capabilities.max_capacity)
        capacity = self.capabilities.capacity(needed)
        if capacity < self.backend.capacity:
            for other in self.slots:
                self._keep(other, other.kept[:capacity])
            self._staged = None  # All windows are staged again.
            self.resize(capacity)

    def _keep(self, slot: Slot, tokens: list[int]) -> None:
        if self._store and len(tokens) < len(slot.kept):
            self._store.save(slot.number, slot.kept, slot.salt)
        slot.kept = tokens

    def _make_room(self, window: Window, size: int) -> None:
        """Grow the cache if a sequence needs it. Passes also write windows into free slots,
        which drop tokens instead."""
        width, slots = self.capabilities.padded_width(window.width), self.slots[:size]
        longest = max((slot.cached for slot in slots if slot.sequence is not None), default=0)
        self._reserve_capacity(longest + width)
        for slot in slots:
            if slot.cached + width > self.backend.capacity:
                self._keep(slot, slot.kept[: self.backend.capacity - width])

    def _fit(self, batch: Batch, decoding: Sequence[Running]) -> bool:
        try:
            self._make_room(batch.window, batch.size)
        except Exception as error:
            self._end_longest(decoding, _error_end(error))
            return False
        return True

    def _compact(self, decoding: list[Running]) -> list[Running]:
        batch_size = self.capabilities.batch_size
        while True:
            last, sequence = decoding[-1]
            lower = [slot for slot in self.slots[: last.number] if slot.sequence is None]
            if not lower or batch_size(len(decoding)) == batch_size(last.number + 1):
                return decoding
            self._move(last, lower[0], sequence)
            decoding = self._running(STALE, STAGED)

    def _move(self, source: Slot, target: Slot, sequence: SequenceState) -> None:
        self._keep(target, [])
        self.backend.cache.copy_slot(source.number, target.number, sequence.cached)
        self.backend.set_sampling(target.number, sequence.request.sampling)
        target.sequence, target.state = sequence, STALE
        target.prompt, target.salt = source.prompt, source.salt
        target.num_drafts = 0  # its drafts were in the window of `source`
        source.sequence, source.state = None, FREE

    # The pass.

    def _build(self, decoding: Sequence[Running]) -> tuple[Batch | None, Tuner | None]:
        """Return the next pass (None without room) and the tuner to inform. The plan is that of
        the oldest request that names one, or the fastest."""
        sequences = [sequence for _, sequence in decoding]
        size = self.capabilities.batch_size(decoding[-1][0].number + 1)
        sampler = max((sequence.sampler for sequence in sequences), key=SAMPLERS.index)
        plan, advice, tuner = None, None, None
        if self._max_drafting is None or len(decoding) <= self._max_drafting:
            named = [sequence for sequence in sequences if sequence.request.plan is not None]
            if len(named) < len(sequences):
                tuner = self._tuner_for(sequences, sampler, size)
            if named:
                plan = min(named, key=lambda sequence: sequence.admission).request.plan
            elif tuner is not None:
                most = max(sequence.request.lookahead_drafts for sequence in sequences)
                choice = tuner.choose(most, size, [sequence.rates for sequence in sequences])
                plan, advice = choice.plan, (tuner, choice)
        proposed = [
            Proposed(None if plan is None else s.propose(), slot.num_drafts, s.rates)
            for slot, s in decoding
        ]
        is_staged = any(slot.state is STAGED for slot, _ in decoding)
        staged = self._staged if is_staged else None
        plan = plan or make_plan("ar", 0)
        situation = Situation(plan, staged, self.room, self.capabilities, size, advice)
        if (next_pass := situation.next_pass(proposed)) is None:
            return None, None
        window, drafts = next_pass
        if tuner is not None:
            for each, verified in zip(proposed, drafts, strict=True):
                if each.drafts is not None and verified is None:
                    tuner.forget_unverified(each.drafts, each.rates)
        wants_logprobs = any(sequence.request.logprobs is not None for sequence in sequences)
        batch = Batch(
            window,
            size,
            sampler,
            tuple(slot.number for slot, _ in decoding),
            tuple(drafts),
            max((s.list_size(window.drafts) for s in sequences if s.processors), default=0),
            self._logprobs_mode if wants_logprobs else None,
        )
        return batch, tuner

    def _tuner_for(
        self, sequences: Sequence[SequenceState], sampler: Sampler, size: int
    ) -> Tuner | None:
        has_begun = all(sequence.stats.passes for sequence in sequences)
        if not has_begun and not self.auto.is_timed(sampler, size):
            return None
        try:
            tuner = self.tuner(sampler, size)
        except (MemoryError, PassError):
            if self.backend.failure is not None:
                raise
            return None  # No sequence ends because there is no memory to time passes beside it.
        if tuner is not None:
            for sequence in sequences:
                sequence.rates = sequence.rates or Rates(tuner.rates)
        return tuner

    def _stage(self, batch: Batch, decoding: Sequence[Running]) -> None:
        if batch.sampler != self._sampler and self.backend.manifest.rule == "rejection":
            # The draft probabilities beside the windows are the other sampler's.
            self._staged = None
        self._sampler = batch.sampler
        for slot in self.slots[: batch.size]:
            if slot.number not in batch.slots and slot.masked_at != slot.cached:
                self._mask(slot)
        for (slot, sequence), drafts in zip(decoding, batch.drafts, strict=True):
            is_there = self._staged == batch.window and slot.state is STAGED
            if is_there and drafts is None:
                continue
            slot.state, slot.masked_at = STALE, None
            tokens = () if drafts is None else drafts.tokens
            root = sequence.tokens[-1]
            self.backend.stage(slot.number, batch.window, sequence.cached, root, tokens)
            slot.num_drafts, slot.state = len(tokens), STAGED
        if batch.touched:
            ids = self.backend.drafts(batch.window, batch.size)
            rows = {
                slot.number: sequence.processor_rows(ids[slot.number], batch.touched)
                for slot, sequence in decoding
            }
            vocab_size = self.capabilities.vocab_size
            unchanged = no_processing(vocab_size, batch.window.drafts + 1, batch.touched)
            for number in range(batch.size):
                self.backend.set_processors(number, rows.get(number) or unchanged)

    def _mask(self, slot: Slot) -> None:
        slot.masked_at = None  # in case the backend fails
        self.backend.mask(slot.number, slot.cached)
        slot.masked_at = slot.cached

    def _run(self, batch: Batch, decoding: Sequence[Running]) -> tuple[PassResult, float]:
        self._staged = None  # If the pass fails, all windows are staged again.
        for _, sequence in decoding:
            if not sequence.stats.passes:
                sequence.stats.begin(self._engine_seconds)
        started = time.perf_counter()
        result = self.backend.run(batch)
        seconds = time.perf_counter() - started
        self._engine_seconds += seconds
        self._staged = batch.window.next
        return result, seconds

    def _apply(
        self,
        batch: Batch,
        result: PassResult,
        decoding: Sequence[Running],
        seconds: float,
        tuner: Tuner | None,
    ) -> None:
        verified, written = [], []
        for (slot, sequence), drafts in zip(decoding, batch.drafts, strict=True):
            ids, drafted = result.tokens[slot.number], slot.num_drafts
            source: TokenSource = "lookahead" if drafts is None else drafts.source
            sources: list[TokenSource] = [source] * (len(ids) - 1) + ["model"]
            logprobs: list[TokenLogprobs | None] = [None] * len(ids)
            if (top := sequence.request.logprobs) is not None:
                logprobs = _logprobs(result.logprobs, slot.number, ids, top)
            written.append(list(map(Token, ids, sources, logprobs)))
            verified.append(Verified(drafts, drafted, len(ids) - 1, sequence.rates))
            sequence.cached += len(ids)
            sequence.stats.record(drafted, len(ids), self._engine_seconds)
            slot.num_drafts = batch.window.next_drafts(len(ids) - 1)
        if tuner is not None:
            tuner.observe(batch.window, batch.size, seconds, verified)
        for (slot, sequence), tokens in zip(decoding, written, strict=True):
            if sequence.processors_error is not None:
                self._end(slot, sequence, _error_end(sequence.processors_error))
                continue
            try:
                sequence.write(tokens)
            except Exception as error:  # of its text reader
                sequence.finish(_error_end(error))
            if sequence.finished is not None:
                self._end(slot, sequence, sequence.finished)

    # Passes without sequences.

    def tuner(self, sampler: Sampler, size: int = 1) -> Tuner | None:
        """Return the tuner of `auto`, after timing passes over `size` slots; None while the KV
        cache lacks room."""
        while untimed := self.auto.untimed(sampler, size, self.room):
            for batch in untimed:
                self.auto.timed(batch, *self.time_pass(batch))
        return self.auto.tuner(sampler, size)

    def time_pass(self, batch: Batch, *, tail: bool = True) -> tuple[float, float]:
        """Run a pass with all slots masked, and return the seconds of trunk and tail. tail:
        whether to run it."""
        self._stage_masked(batch)
        started = time.perf_counter()
        self.backend.run_trunk(batch.window, batch.size)
        trunk_ended = time.perf_counter()
        if tail:
            self.backend.run_tail(batch)
        ended = time.perf_counter()
        self._engine_seconds += ended - started
        return trunk_ended - started, ended - trunk_ended

    def _stage_masked(self, batch: Batch) -> None:
        self._make_room(batch.window, batch.size)
        self._staged = None
        for slot in self.slots[: batch.size]:
            self.backend.stage(slot.number, batch.window, slot.cached, 0)
            self._mask(slot)

    def capture(self, capacity: int, size: int, samplers: Collection[Sampler]) -> None:
        """Capture all plans' passes over `size` masked slots at `capacity` tokens, and prompt
        chunks in slots that no smaller size has. Do nothing while a sequence runs."""
        capabilities, before = self.capabilities, self.backend.capacity
        kept = max(slot.cached for slot in self.slots)
        if self._running() or kept >= capacity:
            return
        lookahead = self.backend.manifest.lookahead.length
        windows = plan_windows(lookahead, capabilities.verifying)
        try:
            self.resize(capacity)
            for window in windows:
                fits = kept + capabilities.padded_width(window.width) <= capacity
                for sampler in samplers if fits and capabilities.allows([window]) else ():
                    self._stage_masked(batch := Batch(window, size, sampler))
                    for _ in range(RUNS_UNTIL_CAPTURED):
                        self.backend.run(batch)
            first = max((each for each in capabilities.batch_sizes if each < size), default=0)
            for slot in self.slots[first:size]:
                for width in capabilities.chunks(kept, capacity):
                    if kept + capabilities.padded_width(width) <= capacity:
                        for _ in range(RUNS_UNTIL_CAPTURED):
                            self.backend.prefill(slot.number, slot.cached, [0], width)
        except PassError as error:
            # Requests that need such a pass will report the error.
            log.warning(
                "passes over %d slots were not all captured, and may be slow or fail: %s",
                size,
                error,
            )
        finally:
            if before and self.backend.failure is None:
                self.resize(before)


def _admission(running: Running) -> int:
    return running[1].admission


def _error_end(error: Exception) -> End:
    return End("error", error=out_of_memory() if isinstance(error, MemoryError) else error)


def _logprobs(
    logprobs: Logprobs | None, slot: int, ids: Sequence[int], count: int | None
) -> list[TokenLogprobs | None]:
    if logprobs is None or count is None:
        return [None] * len(ids)
    chosen = logprobs.chosen[slot].tolist()
    top_ids = logprobs.ids[slot, :, :count].tolist()
    top_values = logprobs.values[slot, :, :count].tolist()
    return [
        TokenLogprobs(chosen[i], tuple(zip(top_ids[i], top_values[i], strict=True)))
        for i in range(len(ids))
    ]
