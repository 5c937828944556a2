"""The display of progress: bars in a terminal, else whole lines, not too many of them."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from pass_exporter import terminal
from pass_exporter.terminal import Terminal


class Clock:
    """time.monotonic, by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(terminal.time, "monotonic", lambda: self.now)


def lines(steps: int, seconds: float, clock: Clock, *, show: bool = True) -> list[str]:
    """Return the lines that a phase prints. seconds: the time of a step."""
    file = io.StringIO()
    with Terminal(Console(file=file, width=40), show=show) as progress:
        step = progress.phase("[training] a model with a long name, longer than forty columns")
        for done in range(1, steps + 1):
            clock.now += seconds
            step(done, steps, f"loss {done}")
        progress.phase("writing")
    return file.getvalue().splitlines()


def test_slow_phases_print_every_tenth_of_their_steps(monkeypatch: pytest.MonkeyPatch):
    first, *told, last = lines(30, 60, Clock(monkeypatch))
    assert first == "[training] a model with a long name, longer than forty columns"
    left = [f"  0:{30 - done:02}:00 left" for done in range(3, 30, 3)] + [""]
    told_after = zip(range(3, 31, 3), left, strict=True)
    assert told == [f"{first}: {done}/30  loss {done}{left}" for done, left in told_after]
    assert last == "writing"


def test_quick_phases_print_their_last_step(monkeypatch: pytest.MonkeyPatch):
    first, told, _ = lines(30, 0.1, Clock(monkeypatch))
    assert told == f"{first}: 30/30  loss 30"


def test_a_phase_of_one_step_prints_no_count(monkeypatch: pytest.MonkeyPatch):
    assert len(lines(1, 100, Clock(monkeypatch))) == 2


def test_other_processes_print_nothing(monkeypatch: pytest.MonkeyPatch):
    assert lines(30, 60, Clock(monkeypatch), show=False) == []


def test_80_columns_are_enough_for_the_remaining_time():
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with Terminal(console) as progress:
        step = progress.phase("checking every plan against plain decoding")  # the longest name
        for done in (1, 2):
            step(done, 40)
            time.sleep(0.02)  # the rate of two steps at one moment is not known
        with console.capture() as shown:
            console.print(progress._bars._progress.get_renderable())
    assert re.search(r"decoding .* 0:00:\d\d left  2/40\b", shown.get()) and "…" not in shown.get()
