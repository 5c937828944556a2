"""Says how far a training run is, by steps or by the clock, and so when it measures and ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from pass_runtime.errors import PassError

WARMUP_STEPS, FINAL_LR_RATIO = 20, 0.05
MEASUREMENTS = 10
"""How often a run measures held-out sequences, if this takes at most a tenth of the run's time."""
WRITING_SECONDS = 5.0
"""The time kept at the end of a run with --minutes to write weights, curves and card."""
T = TypeVar("T")
Clock = Callable[[], float]
"""Returns seconds, as time.monotonic does."""


@dataclass(frozen=True)
class Stage:
    """A part of a run: from step `start` on, the whole run is to take `steps` or `minutes`."""

    start: int
    steps: int | None
    minutes: float | None = None


@dataclass(frozen=True)
class Times:
    """Times of a run, in seconds since its start, and durations of its work, in seconds.

    now: the time of this record. training: when training began. measured: when the last measurement
    of held-out sequences ended. measuring, saving, reading, stepping: the longest time that a
    measurement, a save, reading text, or the steps between two looks at the clock took.
    """

    now: float = 0.0
    training: float = 0.0
    measured: float = 0.0
    measuring: float = 0.0
    saving: float = 0.0
    reading: float = 0.0
    stepping: float = 0.0


def learning_rate_factor(share: float, step: int) -> float:
    """Return the factor of the learning rates: a cosine over the run, down to FINAL_LR_RATIO, times
    a linear warm-up of WARMUP_STEPS. share: the part of the run that is done. step: the number of
    steps since the stage began."""
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (cosine * (1 - FINAL_LR_RATIO) + FINAL_LR_RATIO)


class Schedule:
    """Says how far a run is, and when it is over.

    With --minutes, time counts from the start of `run`, and a resumed run has the minutes that are
    left. Decisions depend on the times of the last look at the clock, which are the first process's
    for all processes, so that all decide the same.
    """

    def __init__(
        self, steps: int | None, minutes: float | None, clock: Clock = time.monotonic
    ) -> None:
        self._steps, self._minutes = steps, minutes
        self._clock, self._start, self._earlier_seconds = clock, clock(), 0.0
        self.by_clock = minutes is not None
        # This process's times, and the times of the last look.
        self._own = self._seen = Times()
        self._steps_start = 0.0

    def now(self) -> float:
        """Return the seconds of the run until now, those before it was resumed included."""
        return self._clock() - self._start + self._earlier_seconds

    def continue_from(self, saved: Mapping[str, float]) -> None:
        """Begin the training with the times `saved` in a checkpoint; {} for a new run."""
        self._earlier_seconds = saved.get("now", 0.0)
        self._own = self._seen = Times(**saved) if saved else Times(training=self.now())

    def times(self) -> Times:
        """Return this process's times."""
        return replace(self._own, now=self.now())

    def see(self, times: Times) -> None:
        """Decide by these times, which are the first process's, until the next call."""
        self._seen, self._steps_start = times, self.now()

    def end_steps(self) -> None:
        """Note how long the steps since the last look took: the next ones may take as long."""
        seconds = self.now() - self._steps_start
        self._own = replace(self._own, stepping=max(self._own.stepping, seconds))

    def timed(self, what: Literal["measuring", "saving", "reading"], work: Callable[[], T]) -> T:
        """Do `work`, note how long it took as `Times.<what>`, and return its result."""
        start = self.now()
        result = work()
        self._own = replace(self._own, **{what: max(getattr(self._own, what), self.now() - start)})
        if what == "measuring":
            self._own = replace(self._own, measured=self.now())
        self._steps_start = self.now()
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
        """Whether held-out sequences are measured after `step` steps, besides after the last."""
        if self._steps is not None:
            return step % max(self._steps // MEASUREMENTS, 1) == 0
        seen = self._seen
        interval = max((self._end - seen.training) / MEASUREMENTS, 10 * seen.measuring)
        return seen.now - seen.measured >= interval

    def has_time_to_read(self) -> bool:
        """Whether there is time to read more text, i.e. twice the longest time that it took."""
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
        """The time at which the last steps begin at the latest, in seconds. What remains is for
        these steps, a measurement, a save, and writing the results."""
        assert self._minutes is not None
        expected = self._seen.stepping + self._seen.measuring + self._seen.saving
        return 60 * self._minutes - 1.25 * expected - WRITING_SECONDS  # a quarter more, to be safe
