"""Shows progress on stderr: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
)
from rich.text import Text

from pass_exporter.progress import NotedStep

LINE_INTERVAL_SECONDS = 10
"""The shortest time between two plain lines about one phase."""


def silence_libraries() -> None:
    """Disable the tqdm bars of transformers and the hub's client, if they are not imported yet."""
    os.environ.setdefault("TQDM_DISABLE", "1")


class Terminal:
    """Shows progress on a console. show: False prints nothing."""

    def __init__(self, console: Console, *, show: bool = True) -> None:
        self._console, self._show, self._bars = console, show, None
        if show and console.is_terminal:
            self._bars = Progress(
                SpinnerColumn(finished_text="[green]✓[/]"),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=12),
                _PhaseStatus(),
                console=console,
            )

    def __enter__(self) -> Terminal:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._bars is not None:
            if kind is None:
                _finish(self._bars)
            self._bars.stop()

    def phase(self, name: str) -> NotedStep:
        bars = self._bars
        if bars is None:
            self._print_line(name)
            return _plain_steps(name, self._print_line)
        _finish(bars)
        task = bars.add_task(name, total=None, note="")
        return lambda done, total, note="": bars.update(
            task, completed=done, total=total, note=note
        )

    def _print_line(self, text: str) -> None:
        if self._show:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _finish(bars: Progress) -> None:
    for task in bars.tasks:
        if not task.finished:
            bars.update(task.id, total=task.total or 1, completed=task.total or 1)
            bars.stop_task(task.id)


class _PhaseStatus(ProgressColumn):
    """The remaining time if it can be estimated, or the elapsed time, the steps done ("3/8"), the
    note."""

    def render(self, task: Task) -> Text:
        if task.time_remaining and not task.finished:
            parts = [f"{_duration(task.time_remaining)} left"]
        else:
            parts = [_duration(task.finished_time if task.finished else task.elapsed)]
        if task.total and task.total > 1:
            parts.append(f"{task.completed:.0f}/{task.total:.0f}")
        return Text("  ".join((*parts, task.fields["note"])), no_wrap=True, overflow="ellipsis")


def _duration(seconds: float | None) -> str:
    return str(timedelta(seconds=int(seconds or 0)))


def _plain_steps(name: str, print_line: Callable[[str], None]) -> NotedStep:
    started = printed_at = time.monotonic()
    printed_tenth = 0

    def step(done: int, total: int, note: str = "") -> None:
        nonlocal printed_tenth, printed_at
        tenth, now = 10 * done // max(total, 1), time.monotonic()
        if (
            total > 1
            and tenth > printed_tenth
            and (done >= total or now - printed_at >= LINE_INTERVAL_SECONDS)
        ):
            remaining = (now - started) * (total - done) / done
            left = f"{_duration(remaining)} left" if done < total else ""
            print_line("  ".join(part for part in (f"{name}: {done}/{total}", note, left) if part))
            printed_tenth, printed_at = tenth, now

    return step
