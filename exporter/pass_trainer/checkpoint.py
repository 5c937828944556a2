"""Writes and reads the checkpoint of a training run, and checks if a run may continue from it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from pass_runtime.errors import PassError

CHECKPOINT, OLD_SUFFIX, STATE_FILE = "checkpoint", ".old", "progress.json"
RUN_LENGTH_FLAGS = ("steps", "minutes")
"""A run has one of them, which a resumed run may raise."""
Clock = Callable[[], float]
"""Returns seconds."""


@dataclass(frozen=True)
class Stage:
    """From step `start` on, the whole run is to take `steps` or `minutes`."""

    start: int
    steps: int | None
    minutes: float | None = None


@dataclass
class History:
    """stages: every extension of `steps` or `minutes` adds one. loss[i]: of step i. shards: of the
    run's text; 0 until it is written. clock: `train.Times` at the last save."""

    stages: list[Stage]
    loss: list[float] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    shards: int = 0
    clock: dict[str, float] = field(default_factory=dict)


class Checkpoint:
    """The directory `output`/checkpoint: weights, optimizer state and history. settings: all that
    the result depends on, as JSON. minutes: between two saves."""

    def __init__(
        self,
        output: Path,
        settings: Mapping[str, Any],
        accelerator: Accelerator,
        minutes: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._accelerator, self._save_minutes, self._clock = accelerator, minutes, clock
        self._path = output / CHECKPOINT
        self._saved_at = self._clock()

    def is_due(self) -> bool:
        return self._clock() - self._saved_at > 60 * self._save_minutes

    def save(self, history: History) -> None:
        """Replace the checkpoint, as every process must; a crash leaves the old or the new one."""
        accelerator, partial = self._accelerator, self._path.with_suffix(".partial")
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()  # Now every process has written its file.
        if accelerator.is_main_process:
            state = {"settings": self.settings} | asdict(history)
            (partial / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
            old_path = self._path.with_suffix(OLD_SUFFIX)
            shutil.rmtree(old_path, ignore_errors=True)
            if self._path.exists():
                self._path.rename(old_path)
            partial.rename(self._path)
            shutil.rmtree(old_path, ignore_errors=True)
        accelerator.wait_for_everyone()
        self._saved_at = self._clock()

    def check(self) -> None:
        """Raise PassError if there is a checkpoint from which this run cannot continue."""
        path = find_checkpoint(self._path)
        if path is not None:
            self._check(_read_state(path))

    def read(self) -> History:
        """Return the history so far; of a new run if there is no checkpoint."""
        run_length = {name: self.settings[name] for name in RUN_LENGTH_FLAGS}
        old_path = self._path.with_suffix(OLD_SUFFIX)
        if self._accelerator.is_main_process and find_checkpoint(self._path) == old_path:
            old_path.rename(self._path)
        self._accelerator.wait_for_everyone()
        if not self._path.is_dir():
            return History([Stage(0, **run_length)])
        state = _read_state(self._path)
        self._check(state)
        try:
            values = {name: state[name] for name in ("loss", "evaluations", "shards", "clock")}
            history = History([Stage(**stage) for stage in state["stages"]], **values)
        except (KeyError, TypeError) as error:
            raise _unusable(self._path, error) from None
        stage, last = Stage(len(history.loss), **run_length), history.stages[-1]
        if (stage.steps, stage.minutes) != (last.steps, last.minutes):
            history.stages.append(stage)
        return history

    def restore(self) -> None:
        """Load weights and optimizer state into what was prepared, if there is a checkpoint."""
        if self._path.is_dir():
            try:
                self._accelerator.load_state(str(self._path))
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                raise _unusable(self._path, error) from None

    def _check(self, state: Mapping[str, Any]) -> None:
        if "shards" not in state or "step" in state:
            raise PassError(
                f"{self._path} is of an earlier version; use --start with its weights, and another "
                "-o"
            )
        saved = _flags(state["settings"])
        for flag, value in _flags(self.settings).items():
            saved_value = saved.get(flag)
            is_length = flag in RUN_LENGTH_FLAGS and None not in (value, saved_value)
            if value == saved_value or (is_length and value > saved_value):
                continue
            remedy = "give at least as many" if is_length else "give the same options"
            # For `data`, the setting is a hash, which tells a user nothing.
            values = "" if flag == "data" else f" ({_shown(saved_value)}, not {_shown(value)})"
            raise PassError(
                f"{self._path} was made with another --{flag}{values}; {remedy}, or another -o"
            )


def planned_length(output: Path) -> dict[str, Any]:
    """Return the RUN_LENGTH_FLAGS of the checkpoint in `output`; {} if there is none."""
    path = find_checkpoint(output / CHECKPOINT)
    if path is None:
        return {}
    settings = _read_state(path)["settings"]
    return {name: settings.get(name) for name in RUN_LENGTH_FLAGS}


def find_checkpoint(path: Path) -> Path | None:
    """Return `path`, its old copy if a save was cut off between its two renames, or None."""
    old_path = path.with_suffix(OLD_SUFFIX)
    return next((each for each in (path, old_path) if each.is_dir()), None)


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        if not isinstance(state["settings"]["steps"], int | None):
            raise TypeError("its number of steps is no number")
        return state
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: Exception) -> PassError:
    return PassError(f"cannot resume from {path}: {error}; delete it to start again")


def _flags(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings and the recipe's by flag, without dashes."""
    flat = {**settings.get("recipe", {}), **settings}
    flat.pop("recipe", None)
    return {name.removesuffix("_sha256").replace("_", "-"): value for name, value in flat.items()}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)
