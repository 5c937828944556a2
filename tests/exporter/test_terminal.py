"""The display of progress: bars in a terminal, and otherwise a line now and then."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from pass_exporter import terminal
from pass_exporter.terminal import Terminal


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(terminal.time, "monotonic", lambda: self.now)


def lines(steps: int, seconds: float, clock: Clock, *, show: bool = True) -> list[str]:
    file = io.StringIO()
    with Terminal(Console(file=file, width=40), show=show) as progress:
        step = progress.phase("[training] a model with a long name, longer than forty columns")
        for done in range(1, steps + 1):
            clock.now += seconds
            step(done, steps, f"loss {done}")
        progress.phase("writing")
    return file.getvalue().splitlines()


def test_slow_phases_print_every_tenth_of_their_steps(monkeypatch: pytest.MonkeyPatch):
    name, *reports, next_phase = lines(30, 60, Clock(monkeypatch))
    assert name == "[training] a model with a long name, longer than forty columns"
    remaining = [f"  0:{30 - done:02}:00 left" for done in range(3, 30, 3)] + [""]
    assert reports == [
        f"{name}: {done}/30  loss {done}{left}"
        for done, left in zip(range(3, 31, 3), remaining, strict=True)
    ]
    assert next_phase == "writing"


def test_quick_phases_print_their_last_step(monkeypatch: pytest.MonkeyPatch):
    name, report, _ = lines(30, 0.1, Clock(monkeypatch))
    assert report == f"{name}: 30/30  loss 30"


def test_a_phase_of_one_step_prints_no_count(monkeypatch: pytest.MonkeyPatch):
    assert len(lines(1, 100, Clock(monkeypatch))) == 2


def test_nothing_is_printed_without_show(monkeypatch: pytest.MonkeyPatch):
    assert lines(30, 60, Clock(monkeypatch), show=False) == []


def test_80_columns_are_enough_for_the_remaining_time():
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with Terminal(console) as progress:
        step = progress.phase("checking every plan against plain decoding")  # the longest name
        for done in (1, 2):
            step(done, 40)
            time.sleep(0.02)  # steps at the same moment would give no rate
        with console.capture() as capture:
            console.print(progress._bars.get_renderable())
    assert (
        re.search(r"decoding .* 0:00:\d\d left  2/40\b", capture.get()) and "…" not in capture.get()
    )
