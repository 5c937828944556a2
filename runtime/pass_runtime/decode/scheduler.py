"""Many requests, few slots: who joins, whose prompt is read, which pass is run, who leaves.

One round admits what fits, reads some of the prompts, and runs one pass over everybody else: nobody waits for a
neighbour's long prompt. What fails ends the sequences that it happened to, and no others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass

from pass_runtime.backends.memory import out_of_memory
from pass_runtime.bundle.plan import Plan, make_cycle
from pass_runtime.decode.draft_policy import Always, Expected, Judge, Pass, View, next_pass
from pass_runtime.decode.runner import Outcome, Runner, Slot
from pass_runtime.decode.sequence import End, Sequence
from pass_runtime.errors import PassError
from pass_runtime.tuning.tuner import PlanTuner
from pass_runtime.tuning.tuners import Tuners

PROMPT_TOKENS = 64
"""Prompt tokens that a round reads at most while others are decoding."""


class QueueFull(PassError):
    """More requests wait than the session was opened for."""


@dataclass(frozen=True)
class Usage:
    """What is the case at one moment. running: sequences in slots; waiting: those without one. cached: entries of the
    KV cache that are theirs, of `capacity` that all slots could have."""

    running: int
    waiting: int
    slots: int
    cached: int
    capacity: int

    @property
    def cache_share(self) -> float:
        """0 to 1."""
        return self.cached / self.capacity


class Scheduler:
    """Everything but `add` and `usage` is for one thread."""

    def __init__(self, runner: Runner, tuners: Tuners, max_queue: int) -> None:
        self.runner, self.tuners = runner, tuners
        self.waiting: deque[Sequence] = deque()
        self._max_queue = max_queue

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.runner.busy

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the queue."""
        if len(self.waiting) >= self._max_queue:
            raise QueueFull(
                f"{len(self.waiting)} requests are waiting already, and the queue holds {self._max_queue}: "
                "try again later, or open the session with a larger max_queue"
            )
        self.waiting.append(sequence)

    def usage(self) -> Usage:
        """For any thread: a look at numbers that another one is changing."""
        running = [slot.sequence for slot in self.runner.slots]
        cached = [sequence.cached for sequence in running if sequence is not None]
        slots = len(self.runner.slots)
        capacity = slots * self.runner.backend.capabilities.max_capacity
        return Usage(len(cached), len(self.waiting), slots, sum(cached), capacity)

    def round(self) -> None:
        """One step of everybody."""
        self._drop_cancelled()
        self._admit()
        self._prefill()
        try:
            if active := self.runner.gather():
                self._decode(active)
        except Exception as error:  # in a pass of all of them, nobody knows whose fault it was
            for slot in self.runner.decoding:
                self._finish(slot, _failed(error))

    def end_all(self, end: End) -> None:
        """Finish every sequence, waiting ones too."""
        for slot in self.runner.busy:
            self._finish(slot, end)
        while self.waiting:
            self.waiting.popleft().finish(end)

    def _drop_cancelled(self) -> None:
        for slot in self.runner.slots:
            if slot.sequence is not None and slot.sequence.cancelled:
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
                    sequence.finish(_failed(error))
            self.waiting.popleft()

    def _prefill(self) -> None:
        """Chunks of the prompts, the oldest first; wide ones where nobody is decoding."""
        reading = [slot for slot in self.runner.slots if slot.sequence is not None and not slot.sequence.prefilled]
        if not reading:
            return
        most = PROMPT_TOKENS if self.runner.decoding else None
        read = 0
        for slot in sorted(reading, key=lambda slot: slot.admitted):
            try:
                self.runner.share(slot)  # whoever reads the same prompt is older, and done
                while slot.sequence is not None and not slot.sequence.prefilled:
                    if read and (most is None or read >= most):
                        return  # whoever else there is has a turn, or may be cancelled, behind every chunk
                    read += self.runner.prefill(slot, most)
            except Exception as error:
                self._finish(slot, _failed(error))

    def _decode(self, active: Items[Slot]) -> None:
        batch = self.runner.batch(active)
        tuner = self._tuner(active, batch)
        views = [_view(slot) for slot in active]
        chosen = self._choose(active, views, tuner, batch)
        if chosen is None:
            self._end_longest(active, End("length"))
            return
        drafts = {slot.number: d for slot, d in zip(active, chosen.drafts, strict=True) if d is not None}
        try:
            self.runner.make_room(chosen.plan, batch)
        except Exception as error:
            self._end_longest(active, _failed(error))
            return
        outcomes, seconds = self.runner.run(chosen.plan, drafts)
        if tuner is not None:
            _observe(tuner, chosen.plan, batch, seconds, outcomes, views)
        self._deliver(outcomes)

    def _choose(self, active: Items[Slot], views: Items[View], tuner: PlanTuner | None, batch: int) -> Pass | None:
        """The oldest request with a plan of its own decides for all: a pass runs one plan. Else it is the fastest."""
        sequences = [slot.sequence for slot in sorted(active, key=lambda slot: slot.admitted) if slot.sequence]
        cycle = next((s.request.cycle for s in sequences if s.request.cycle is not None), None)
        judge: Judge = Always()
        if cycle is None and tuner is not None:
            limit = max(sequence.request.lookahead for sequence in sequences)
            accepted = [sequence.acceptance for sequence in sequences if sequence.acceptance is not None]
            decided = tuner.mode(limit, batch, accepted)
            cycle, judge = decided.cycle, Expected(tuner, decided, batch)
        elif cycle is None:
            cycle, views = make_cycle("ar", 0), [View()] * len(views)
        runner = self.runner
        # Nobody's windows are in place where all have just been admitted: a round begins, whatever was run before.
        window = runner.window if any(slot.entered for slot in active) else None
        return next_pass(cycle, window, runner.room, runner.backend.capabilities, views, judge)

    def _tuner(self, active: Items[Slot], batch: int) -> PlanTuner | None:
        """What knows the speeds of these requests, where one of them leaves the plan open. None also where that takes
        timing passes first and one of them has no token yet: a plain pass gives it without that wait."""
        sequences = [slot.sequence for slot in active if slot.sequence is not None]
        if all(sequence.request.cycle is not None for sequence in sequences):
            return None
        sampler = self.runner.sampler(active)
        if not self.tuners.known(sampler, batch) and not all(sequence.stats.passes for sequence in sequences):
            return None
        tuner = self.tuners.get(sampler, batch)
        for sequence in sequences:
            if sequence.acceptance is None:
                sequence.acceptance = tuner.new_acceptance()
        return tuner

    def _deliver(self, outcomes: Items[Outcome]) -> None:
        for outcome in outcomes:
            sequence = outcome.sequence
            sequence.stats.record(outcome.drafted, len(outcome.tokens))
            try:
                sequence.write(outcome.tokens)
            except Exception as error:  # its text's
                sequence.finish(_failed(error))
        for slot in self.runner.slots:
            if slot.sequence is not None and slot.sequence.finished is not None:
                self.runner.release(slot)

    def _end_longest(self, active: Items[Slot], end: End) -> None:
        """The sequence that there is no room for; the others go on."""
        self._finish(max(active, key=lambda slot: slot.cached), end)

    def _finish(self, slot: Slot, end: End) -> None:
        sequence = slot.sequence
        self.runner.release(slot)
        if sequence is not None:
            sequence.finish(end)


def _failed(error: Exception) -> End:
    return End("error", error=out_of_memory() if isinstance(error, MemoryError) else error)


def _view(slot: Slot) -> View:
    sequence = slot.sequence
    if sequence is None or sequence.index is None:
        return View(slot.left)
    return View(slot.left, sequence.index.propose(sequence.request.text_drafts), sequence.index.matched)


def _observe(
    tuner: PlanTuner, plan: Plan, batch: int, seconds: float, outcomes: Items[Outcome], views: Items[View]
) -> None:
    """What the pass says about speeds and drafts."""
    tuner.observe(plan, batch, seconds)
    for outcome, view in zip(outcomes, views, strict=True):
        accepted = len(outcome.tokens) - 1
        if not outcome.drafted:
            continue
        if outcome.source == "ngram":
            tuner.text(view.matched).record(outcome.drafted, accepted)
        else:
            tuner.drafts.record(outcome.drafted, accepted)
            if outcome.sequence.acceptance is not None:
                outcome.sequence.acceptance.record(outcome.drafted, accepted)
    if not plan.groups and not any(outcome.drafted for outcome in outcomes):
        tuner.drafts.forget()
        for outcome in outcomes:
            if outcome.sequence.acceptance is not None:
                outcome.sequence.acceptance.forget()
