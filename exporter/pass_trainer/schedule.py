"""How far a run is, by steps or by the clock, and what follows: rates, measurements, its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from pass_runtime.errors import PassError

WARMUP_STEPS, FINAL_LR_RATIO = 20, 0.05
MEASUREMENTS = 10
"""How often a run measures held-out sequences, if that takes at most a tenth of its time."""
WRITING_SECONDS = 5.0
"""Kept at the end of a run with --minutes to write weights, curves and card."""
T = TypeVar("T")
Clock = Callable[[], float]
"""Returns seconds, as time.monotonic does."""


@dataclass(frozen=True)
class Stage:
    """A part of a run: from step `start` on, with the schedule of so many steps or minutes."""

    start: int
    steps: int | None
    minutes: float | None = None


@dataclass(frozen=True)
class Times:
    """Seconds of a run: until now, when its training and its last measurement began and ended. And
    the longest times that a measurement, a save, reading text, and steps between looks took."""

    now: float = 0.0
    training: float = 0.0
    measured: float = 0.0
    measuring: float = 0.0
    saving: float = 0.0
    reading: float = 0.0
    stepping: float = 0.0


def learning_rate_factor(share: float, step: int) -> float:
    """Return the factor of the learning rates: a cosine over the run, of which `share` is done,
    down to FINAL_LR_RATIO, times a linear warm-up of WARMUP_STEPS. step: of the stage."""
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (cosine * (1 - FINAL_LR_RATIO) + FINAL_LR_RATIO)


class Schedule:
    """Where a run is. With --minutes, time counts from the start of `run`, and a resumed run has
    the rest.

    Decisions follow the times of the last look, `seen`. Of several processes, all see those of the
    first, so that all decide the same.
    """

    def __init__(
        self, steps: int | None, minutes: float | None, clock: Clock = time.monotonic
    ) -> None:
        self._steps, self._minutes = steps, minutes
        self._clock, self._began, self._before = clock, clock(), 0.0
        self.by_clock = minutes is not None
        self._own = self._seen = Times()
        self._steps_began = 0.0

    def now(self) -> float:
        """Return the seconds of the run until now, those before it was resumed included."""
        return self._clock() - self._began + self._before

    def continue_from(self, saved: Mapping[str, float]) -> None:
        """Continue a run with the times of its checkpoint; empty: this is the run's start."""
        self._before = saved.get("now", 0.0)
        self._own = self._seen = Times(**saved) if saved else Times(training=self.now())

    def times(self) -> Times:
        """Return this process's times."""
        return replace(self._own, now=self.now())

    def see(self, times: Times) -> None:
        """Decide by the first process's `times` from now on."""
        self._seen, self._steps_began = times, self.now()

    def end_steps(self) -> None:
        """End the steps since the last look: their time is kept for those until the next look."""
        self._own = replace(
            self._own, stepping=max(self._own.stepping, self.now() - self._steps_began)
        )

    def timed(self, what: Literal["measuring", "saving", "reading"], work: Callable[[], T]) -> T:
        """Do `work`, and remember how long it took: so much time is kept for it at the end."""
        began = self.now()
        result = work()
        self._own = replace(self._own, **{what: max(getattr(self._own, what), self.now() - began)})
        if what == "measuring":
            self._own = replace(self._own, measured=self.now())
        self._steps_began = self.now()
        return result

    def share(self, step: int) -> float:
        """Return the share of the run that is done, 0 to 1."""
        if self._steps is not None:
            return step / self._steps
        seen = self._seen
        return min(max(seen.now - seen.training, 0.0) / max(self._end - seen.training, 1e-9), 1.0)

    def is_over(self, step: int) -> bool:
        return step >= self._steps if self._steps is not None else self._seen.now >= self._end

    def is_measured_at(self, step: int) -> bool:
        """Whether held-out sequences are measured after `step` steps, besides the end."""
        if self._steps is not None:
            return step % max(self._steps // MEASUREMENTS, 1) == 0
        seen = self._seen
        between = max((self._end - seen.training) / MEASUREMENTS, 10 * seen.measuring)
        return seen.now - seen.measured >= between

    def has_room_to_read(self) -> bool:
        """Whether there is time to read more text: twice what reading took so far at most."""
        return self._steps is not None or self.now() + 2 * self._own.reading < self._end

    def check_text_in_time(self) -> None:
        """Raise PassError if the run must end before it has text to train on."""
        if self._steps is None and self.now() >= self._end:
            raise PassError(
                f"--minutes {self._minutes:g} passed before there was text to train on; give "
                "more minutes"
            )

    @property
    def _end(self) -> float:
        """When the last steps begin at the latest, in seconds: time is kept for them, measuring,
        saving and writing."""
        assert self._minutes is not None
        kept = self._seen.stepping + self._seen.measuring + self._seen.saving
        return 60 * self._minutes - 1.25 * kept - WRITING_SECONDS
