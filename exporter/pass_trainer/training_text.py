"""Holds the sequences of a training run, which grow in number while text is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pass_exporter.progress import Step
from pass_trainer.config import MAX_HELD_OUT
from pass_trainer.deck import Deck
from pass_trainer.distill import Sequences
from pass_trainer.schedule import Schedule
from pass_trainer.text_supply import TextSupply, WhenWritten, count_shards


class TrainingText:
    """Adds shards to the run's text (a shard *joins*), and deals their sequences to steps. The
    first sequences are held out. when_written: the result of `text_supply.when_written`.

    With --steps, the step at which a shard joins depends on the settings alone: all shards join one
    after another in the first half of the run, which waits for them. With --minutes, a shard joins
    once it is written.
    """

    def __init__(
        self,
        supply: TextSupply,
        when_written: WhenWritten,
        schedule: Schedule,
        *,
        held_out: int | None,
        seed: int,
        processes: int,
    ) -> None:
        self._supply, self._when_written = supply, when_written
        self._schedule, self._processes = schedule, processes
        self._shard_count = 0
        self._held_out = held_out or self._default_held_out()
        self._all: Sequences | None = None
        self.deck = Deck(seed)

    def _default_held_out(self) -> int:
        """Return a sixteenth of all sequences, or an eighth of a shard if their number is open; at
        least 1 and at most MAX_HELD_OUT."""
        distiller = self._supply.distiller
        sequences = distiller.recipe.sequences
        share = distiller.shard_size // 8 if sequences is None else sequences // 16
        return min(max(share, 1), MAX_HELD_OUT)

    @property
    def held_out(self) -> Sequences:
        return self.sequences.part(slice(self._held_out))

    @property
    def sequences(self) -> Sequences:
        assert self._all is not None, "no text was read yet"
        return self._all

    def begin(self, joins: Sequence[Sequence[int]], dealt: int, progress: Step) -> None:
        """Read the first text, or all that a resumed run had. joins: `Deck.joins` of that run:
        (indices dealt before, size of the deck after) each join. dealt: how many indices it had
        dealt."""
        sequences = (joins[-1][1] if joins else 1) + self._held_out
        shards = -(-sequences // self._supply.distiller.shard_size)
        self._read(shards if self._schedule.by_clock else max(shards, self._due(0)), progress)
        self.deck.replay(joins, dealt)
        self._grow()

    def wanted(self) -> int:
        """Return how many shards a run with --minutes should have read now.

        These are the shards that exist. Each process is to write one more if all of this holds:
        text is written between steps, every sequence was used once, and there is time for more.
        """
        self._supply.check()
        shards = count_shards(self._supply.distiller, self._supply.directory)
        needs_more = self._when_written == "between" and self.deck.was_dealt
        if needs_more and self._schedule.has_time_to_read():
            shards = max(shards, self._shard_count + self._processes)
        all_shards = self._supply.distiller.shard_count
        return shards if all_shards is None else min(shards, all_shards)

    def join(self, step: int, wanted: int) -> None:
        """Let the shards join that are due at `step`. wanted: the result of the first process's
        `wanted`, so that all processes do the same."""
        due = wanted if self._schedule.by_clock else self._due(step)
        if due > self._shard_count:
            self._read(due)
            self._grow()

    def deal(self, count: int) -> list[int]:
        """Return the indices of `count` sequences in `sequences`."""
        return [self._held_out + index for index in self.deck.deal(count)]

    def _due(self, step: int) -> int:
        """Return how many shards a run with --steps has at `step`."""
        all_shards = self._supply.distiller.shard_count
        assert all_shards is not None
        if self._when_written == "first":
            return all_shards
        return min(1 + int(2 * self._schedule.share(step) * all_shards), all_shards)

    def _read(self, count: int, progress: Step | None = None) -> None:
        """Read the shards below `count` that were not read, and wait for them if necessary."""

        def read() -> Sequences:
            self._supply.wait(count, progress)
            new_shards = range(self._shard_count, count)
            return self._supply.distiller.read(self._supply.directory, new_shards)

        new = self._schedule.timed("reading", read)
        self._all = new if self._all is None else joined(self._all, new)
        self._shard_count = count

    def _grow(self) -> None:
        self.deck.grow(len(self.sequences) - self._held_out)


def joined(a: Sequences, b: Sequences) -> Sequences:
    names = ("tokens", "prompt_lengths", "lengths")
    return Sequences(*(torch.cat([getattr(a, name), getattr(b, name)]) for name in names))
