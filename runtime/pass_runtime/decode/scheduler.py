"""Continuous batching: decides which sequences get slots, whose prompts are prefilled, and which
pass is run.

One step admits waiting sequences to free slots, prefills some prompt chunks, and runs one pass over
all sequences that decode, so that no sequence waits for the long prompt of another. An error ends
only the sequences in whose prefill or pass it was raised.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pass_runtime.backends.memory import out_of_memory
from pass_runtime.bundle.plan import Plan, make_cycle
from pass_runtime.decode.draft_policy import DraftPolicy, ExpectedRate, NextPass, Situation
from pass_runtime.decode.runner import Runner, SlotResult
from pass_runtime.decode.sequence import End, Request, SequenceState, Slot
from pass_runtime.errors import PassError
from pass_runtime.tuning.tuner import Tuner, Tuners

MAX_PROMPT_TOKENS = 64
"""While some sequences decode, a step prefills about this many prompt tokens of others, in chunks
of at most this many rows."""


class QueueFull(PassError):
    """All slots and all places in the queue are taken."""

    def __init__(self, waiting: int, max_queue: int, count: int) -> None:
        # The message without advice, for callers that have their own.
        self.reason = (
            f"{waiting} requests are waiting already, and the queue holds {max_queue}: no room "
            f"for {count} more"
        )
        super().__init__(
            f"{self.reason}; try again later, or open the session with a larger max_queue"
        )


@dataclass(frozen=True)
class Usage:
    """The load at one moment. running, waiting: how many sequences are in slots and in the queue.
    cached: how many tokens of running sequences are in the KV cache. capacity: the largest KV
    capacity of all slots together, in tokens. graphs_not_captured: how many ONNX graphs or passes
    are slow because they could not be captured as CUDA graphs. kernels: `Capabilities.kernels`."""

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


class Scheduler:
    """Decides what the runner does. Any thread may call `usage`, and, one thread at a time, `add`,
    `reserve` and `release`. Only the thread that decodes calls the other methods."""

    def __init__(
        self,
        runner: Runner,
        tuners: Tuners,
        max_queue: int,
        speculative_max_concurrency: int | None = None,
    ) -> None:
        self.runner, self.tuners = runner, tuners
        self._speculative_max_concurrency = speculative_max_concurrency
        self.waiting: deque[SequenceState] = deque()
        self._max_queue = max_queue
        self._reserved = 0
        # sequences that have not ended, and ended ones that a reader still refers to
        self._added = weakref.WeakSet[SequenceState]()

    @property
    def idle(self) -> bool:
        """Whether no sequence runs or waits."""
        return not self.waiting and not self.runner.busy

    def add(self, *sequences: SequenceState) -> None:
        """Put sequences at the end of the queue, into places that `reserve` reserved for them."""
        self._added.update(sequences)
        self.waiting += sequences
        self.release(len(sequences))

    def reserve(self, count: int, max_queue: int | None = None) -> None:
        """Reserve places for `count` sequences until `add` uses or `release` frees them. There are
        as many places as slots, and `max_queue` more (None: the session's max_queue). Every
        sequence has a place until its end. Raises QueueFull if fewer places are free."""
        taken = sum(sequence.finished is None for sequence in self._added) + self._reserved
        limit = self._max_queue if max_queue is None else max_queue
        slots = len(self.runner.slots)
        if taken + count > slots + limit:
            raise QueueFull(max(taken - slots, 0), limit, count)
        self._reserved += count

    def release(self, count: int) -> None:
        """Give back `count` reserved places."""
        self._reserved -= count

    def usage(self) -> Usage:
        """Return the load now. Another thread may be changing it."""
        running = [slot.sequence for slot in self.runner.slots]
        cached = [sequence.cached for sequence in running if sequence is not None]
        slots = len(self.runner.slots)
        backend = self.runner.backend
        capacity = slots * backend.capabilities.max_capacity
        return Usage(
            len(cached),
            len(self.waiting),
            slots,
            sum(cached),
            capacity,
            len(backend.uncaptured),
            backend.capabilities.kernels,
        )

    def step(self) -> None:
        """End cancelled sequences, admit waiting ones, prefill, and run one pass."""
        self._drop_cancelled()
        self._admit()
        self._prefill()
        for slot in self.runner.decoding:
            if slot.current.request.max_new_tokens == 0:
                self._finish(slot, End("length"))
        decoding = [slot.current for slot in self.runner.decoding]
        try:
            if active := self.runner.compact():
                self._decode(active)
        except Exception as error:  # A pass fails for all sequences in it.
            for slot in self.runner.busy:
                if slot.current in decoding:
                    self._finish(slot, _error_end(error))

    def end_all(self, end: End) -> None:
        """Finish every sequence, waiting ones too."""
        for slot in self.runner.busy:
            self._finish(slot, end)
        while self.waiting:
            self.waiting.popleft().finish(end)

    def _drop_cancelled(self) -> None:
        for slot in self.runner.busy:
            if slot.current.cancelled:
                self._finish(slot, End("cancelled"))
        if self.waiting:
            for sequence in [sequence for sequence in self.waiting.copy() if sequence.cancelled]:
                self.waiting.remove(sequence)
                sequence.finish(End("cancelled"))

    def _admit(self) -> None:
        while self.waiting:
            sequence = self.waiting[0]
            if not self.runner.fits(len(sequence.request.prompt_ids)):
                sequence.finish(End("length"))
            else:
                try:
                    if not self.runner.admit(sequence):
                        return
                except Exception as error:
                    sequence.finish(_error_end(error))
            self.waiting.popleft()

    def _prefill(self) -> None:
        """Prefill prompts, those of the oldest sequences first: about MAX_PROMPT_TOKENS tokens
        while sequences decode, and one chunk of any width if none does."""
        prefilling = [slot for slot in self.runner.busy if not slot.current.prefilled]
        if not prefilling:
            return
        limit = MAX_PROMPT_TOKENS if self.runner.decoding else None
        read = 0
        for slot in sorted(prefilling, key=lambda slot: slot.current.admission_number):
            try:
                # An older sequence may have prefilled the same prompt by now.
                self.runner.share(slot)
                while not slot.current.prefilled:
                    if read and (limit is None or read >= limit):
                        return  # so that the next step can admit and cancel sequences
                    read += self.runner.prefill(slot, limit)
            except Exception as error:
                self._finish(slot, _error_end(error))

    def _decode(self, active: Sequence[Slot]) -> None:
        limit = self._speculative_max_concurrency
        batch, may_draft = self.runner.batch(active), limit is None or len(active) <= limit
        tuner = self._tuner(active, batch) if may_draft else None
        chosen = self._choose_pass(active, tuner, batch, may_draft=may_draft)
        if chosen is None:
            self._end_longest(active, End("length"))
            return
        plan, drafts = chosen
        try:
            self.runner.make_room(plan, batch)
        except Exception as error:
            self._end_longest(active, _error_end(error))
            return
        results, seconds = self.runner.run(plan, drafts)
        if tuner is not None:
            _observe(tuner, plan, batch, seconds, results, active)
        self._deliver(results)

    def _choose_pass(
        self, active: Sequence[Slot], tuner: Tuner | None, batch: int, *, may_draft: bool
    ) -> NextPass | None:
        """Return the next pass. It has one plan for all sequences: that of the oldest request that
        names a plan, or the fastest if none does. A tree is replaced by a chain of the same depth
        if one of the requests does not allow trees."""
        sequences = sorted((slot.current for slot in active), key=lambda s: s.admission_number)
        cycle = next((s.request.cycle for s in sequences if s.request.cycle is not None), None)
        policy = DraftPolicy()
        if not may_draft:
            cycle = None
        elif cycle is None and tuner is not None:
            depth = max(sequence.request.lookahead_drafts for sequence in sequences)
            acceptances = [s.lookahead_acceptance for s in sequences if s.lookahead_acceptance]
            candidate = tuner.next_candidate(depth, batch, acceptances)
            cycle, policy = candidate.cycle, ExpectedRate(tuner, candidate, batch)
        if cycle is not None and cycle.is_tree:
            trees_allowed = all(_allows_tree(s.request) for s in sequences)
            cycle = cycle if trees_allowed else cycle.narrower()
        for slot in active:
            slot.propose(ngrams=cycle is not None)
        runner = self.runner
        # If no slot has a window, as after all have just been admitted, the cycle begins anew.
        staged_plan = runner.staged_plan if any(slot.staged for slot in active) else None
        cycle, capabilities = cycle or make_cycle("ar", 0), runner.backend.capabilities
        situation = Situation(cycle, staged_plan, runner.room, capabilities, active, policy)
        return situation.next_pass()

    def _tuner(self, active: Sequence[Slot], batch: int) -> Tuner | None:
        """Return the tuner for these sequences; None if all of them name plans, or if passes are
        not timed yet. Passes are timed once each sequence has its first token and the KV cache has
        room for the timed windows; until then sequences are decoded plainly."""
        sequences = [slot.current for slot in active]
        if all(sequence.request.cycle is not None for sequence in sequences):
            return None
        sampler = self.runner.sampler(active)
        is_timed = self.tuners.is_timed(sampler, batch)
        if not is_timed and not all(sequence.stats.passes for sequence in sequences):
            return None
        if (tuner := self.tuners.get(sampler, batch)) is None:
            return None
        for sequence in sequences:
            if sequence.lookahead_acceptance is None:
                sequence.lookahead_acceptance = tuner.new_acceptance()
        return tuner

    def _deliver(self, results: Sequence[SlotResult]) -> None:
        for result in results:
            sequence = result.sequence
            sequence.stats.record(result.drafted, len(result.tokens))
            if sequence.processors_error is not None:
                sequence.finish(_error_end(sequence.processors_error))
                continue
            try:
                sequence.write(result.tokens)
            except Exception as error:  # of its detokenizer
                sequence.finish(_error_end(error))
        for slot in self.runner.busy:
            if slot.current.finished is not None:
                self.runner.release(slot)

    def _end_longest(self, active: Sequence[Slot], end: End) -> None:
        """End the longest sequence, because there is no room for its next window."""
        self._finish(max(active, key=lambda slot: slot.cached), end)

    def _finish(self, slot: Slot, end: End) -> None:
        sequence = slot.current
        self.runner.release(slot)
        sequence.finish(end)


def _allows_tree(request: Request) -> bool:
    """Whether a request may be decoded with trees. It must name a tree or "auto", because the
    second choices of a tree round differently from a chain. And it must have neither
    log-probabilities nor logits processors, whose graphs read the rows of a chain."""
    names_no_chain = request.cycle is None or request.cycle.is_tree
    return names_no_chain and request.logprobs is None and request.processing is None


def _error_end(error: Exception) -> End:
    return End("error", error=out_of_memory() if isinstance(error, MemoryError) else error)


def _observe(
    tuner: Tuner,
    plan: Plan,
    batch: int,
    seconds: float,
    results: Sequence[SlotResult],
    slots: Sequence[Slot],
) -> None:
    """Record how long a pass took, and how many of its drafts were accepted: in the tuner for all
    sequences together, and in each sequence for itself."""
    tuner.observe(plan, batch, seconds)
    for result, slot in zip(results, slots, strict=True):
        sequence, accepted = result.sequence, result.accepted_first_choices
        if not result.drafted:
            continue
        if result.source == "lookahead":
            tuner.lookahead_acceptance.record(result.drafted, accepted)
            if sequence.lookahead_acceptance is not None:
                sequence.lookahead_acceptance.record(result.drafted, accepted)
        else:
            for own in (sequence.ngram_acceptance, None):  # None: the tuner's, for all sequences
                tuner.ngram(slot.match_length, own).record(result.drafted, accepted)
    if not plan.groups and not any(result.drafted for result in results):
        # After many plain passes, the rates of look-ahead drafts are out of date.
        tuner.lookahead_acceptance.forget()
        for result in results:
            if result.sequence.lookahead_acceptance is not None:
                result.sequence.lookahead_acceptance.forget()
