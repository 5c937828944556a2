"""The sequences of steps, which grow while text is written. The first ones are held out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pass_exporter.progress import Step
from pass_trainer.config import MAX_HELD_OUT
from pass_trainer.deck import Deck
from pass_trainer.distill import Sequences
from pass_trainer.schedule import Schedule
from pass_trainer.text_supply import TextSupply, Way, count_shards


class TrainingText:
    """Reads shards as they join, and deals their sequences.

    With --steps, the step at which a shard joins depends on the settings alone, and is waited for:
    the first half of the run takes all shards, one after another. With --minutes, a shard joins
    once it is there.
    """

    def __init__(
        self,
        supply: TextSupply,
        way: Way,
        schedule: Schedule,
        *,
        held_out: int | None,
        seed: int,
        processes: int,
    ) -> None:
        self._supply, self._way, self._schedule, self._processes = supply, way, schedule, processes
        self._shards = 0
        self._held_out = held_out or self._default_held_out()
        self._all: Sequences | None = None
        self.deck = Deck(seed)

    def _default_held_out(self) -> int:
        """Return a sixteenth, at most MAX_HELD_OUT; of endless text an eighth of a shard."""
        end = self._supply.distiller.recipe.sequences
        return min(
            max(self._supply.distiller.shard // 8 if end is None else end // 16, 1), MAX_HELD_OUT
        )

    @property
    def held_out(self) -> Sequences:
        return self.sequences.part(slice(self._held_out))

    @property
    def sequences(self) -> Sequences:
        assert self._all is not None, "no text was read yet"
        return self._all

    def begin(self, joins: Sequence[Sequence[int]], dealt: int, progress: Step) -> None:
        """Read the first text, or all of a resumed run, and go on after `dealt` dealt indices."""
        shard = self._supply.distiller.shard
        sequences = (joins[-1][1] if joins else 1) + self._held_out
        self._read(
            max(-(-sequences // shard), 0 if self._schedule.by_clock else self._due(0)), progress
        )
        self.deck.replay(joins, dealt)
        self._grow()

    def wanted(self) -> int:
        """Return how many shards a run with --minutes has now. The first process decides.

        They are those that exist; and one more for each process, if text is written between steps,
        every sequence was used once, and there is time to write.
        """
        self._supply.check()
        written = count_shards(self._supply.distiller, self._supply.directory)
        if self._way == "between" and self.deck.was_dealt and self._schedule.has_room_to_read():
            written = max(written, self._shards + self._processes)
        end = self._supply.distiller.shard_count
        return written if end is None else min(written, end)

    def join(self, step: int, wanted: int) -> None:
        """Let the shards join that are due at `step`. wanted: what the first process's `wanted`
        returned."""
        due = wanted if self._schedule.by_clock else self._due(step)
        if due > self._shards:
            self._read(due)
            self._grow()

    def deal(self, count: int) -> list[int]:
        """Return the indices of `count` sequences in `sequences`."""
        return [self._held_out + index for index in self.deck.deal(count)]

    def _due(self, step: int) -> int:
        """Return the shards of a run with --steps at `step`."""
        end = self._supply.distiller.shard_count
        assert end is not None
        return (
            end if self._way == "first" else min(1 + int(2 * self._schedule.share(step) * end), end)
        )

    def _read(self, shards: int, progress: Step | None = None) -> None:
        def read() -> Sequences:
            self._supply.wait(shards, progress)
            return self._supply.distiller.read(self._supply.directory, range(self._shards, shards))

        new = self._schedule.timed("reading", read)
        self._all = new if self._all is None else joined(self._all, new)
        self._shards = shards

    def _grow(self) -> None:
        self.deck.grow(len(self.sequences) - self._held_out)


def joined(a: Sequences, b: Sequences) -> Sequences:
    names = ("tokens", "prompt_lengths", "lengths")
    return Sequences(*(torch.cat([getattr(a, name), getattr(b, name)]) for name in names))
