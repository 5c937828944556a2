"""Writes and reads the checkpoint of a training run, and checks if a run may continue from it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from pass_runtime.errors import PassError
from pass_trainer.schedule import Clock, Stage

CHECKPOINT, OLD_SUFFIX = "checkpoint", ".old"
STATE_FILE = "progress.json"
"""The file of a checkpoint with the step, the settings and the history."""
FLAG_NAMES = {
    "length": "sequence-length",
    "prompt": "prompt-tokens",
    "chat": "chat-share",
    "data_sha256": "data",
}
"""The flag of each setting whose name is not that of its flag."""
DEFAULT_SETTINGS = {"aim": "distribution", "minutes": None}
"""The values of settings that checkpoints of earlier versions lack."""
RUN_LENGTH_FLAGS = ("steps", "minutes")
"""The flags that say how long a run is. A run has one of the two; a resumed run may raise it."""


@dataclass
class History:
    """The measurements of a run so far.

    stages: a run begins with one, and every extension of `steps` or `minutes` adds one.
    loss[i]: the loss of step i.
    evaluations: the results of `trainer.Hooks.evaluate`.
    joins: `Deck.joins`, which says when training text joined.
    clock: the fields of `schedule.Times` at the last save.
    """

    stages: list[Stage]
    loss: list[float] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    joins: list[list[int]] = field(default_factory=list)
    clock: dict[str, float] = field(default_factory=dict)


class Checkpoint:
    """The directory `output`/checkpoint with trained weights, optimizer state and history.

    settings: everything that the result depends on, as JSON. A run continues from a checkpoint only
    with the same settings, except that `steps` or `minutes` may be larger.
    minutes: the time between two saves.
    """

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
        """Whether `minutes` have passed since the last save."""
        return self._clock() - self._saved_at > 60 * self._save_minutes

    def save(self, step: int, history: History) -> None:
        """Replace the checkpoint. Every process of the run must call this."""
        accelerator, partial = self._accelerator, self._path.with_suffix(".partial")
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()  # Now every process has written its file.
        if accelerator.is_main_process:
            state = {"step": step, "settings": self.settings} | asdict(history)
            (partial / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
            replace_directory(partial, self._path)
        accelerator.wait_for_everyone()
        self._saved_at = self._clock()

    def check(self) -> None:
        """Raise PassError if there is a checkpoint from which this run cannot continue."""
        path = find_checkpoint(self._path)
        if path is not None:
            self._check(_read_state(path))

    def load(self) -> tuple[int, History]:
        """Load the checkpoint, if there is one. Return the next step and the history so far."""
        run_length = {name: self.settings[name] for name in RUN_LENGTH_FLAGS}
        old_path = self._path.with_suffix(OLD_SUFFIX)
        if self._accelerator.is_main_process and find_checkpoint(self._path) == old_path:
            old_path.rename(self._path)
        self._accelerator.wait_for_everyone()
        if not self._path.is_dir():
            return 0, History([Stage(0, **run_length)])
        state = _read_state(self._path)
        self._check(state)
        try:
            stages = [Stage(**stage) for stage in state["stages"]]
            history = History(
                stages,
                state["loss"],
                state["evaluations"],
                state.get("joins", []),
                state.get("clock", {}),
            )
            step = int(state["step"])
            self._accelerator.load_state(str(self._path))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise _unusable(self._path, error) from None
        stage = Stage(step, **run_length)
        if (stage.steps, stage.minutes) != (stages[-1].steps, stages[-1].minutes):
            stages.append(stage)
        return step, history

    def _check(self, state: Mapping[str, Any]) -> None:
        saved = DEFAULT_SETTINGS | _flags(state["settings"])
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
    """Return the checkpoint `path`, or None.

    If a save was interrupted between the two renames of `replace_directory`, this is the old copy.
    """
    old_path = path.with_suffix(OLD_SUFFIX)
    return next((each for each in (path, old_path) if each.is_dir()), None)


def replace_directory(part: Path, path: Path) -> None:
    """Replace `path` by the finished directory `part`. A crash leaves the old or the new one."""
    old_path = path.with_suffix(OLD_SUFFIX)
    shutil.rmtree(old_path, ignore_errors=True)
    if path.exists():
        path.rename(old_path)
    part.rename(path)
    shutil.rmtree(old_path, ignore_errors=True)


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
    """Return the settings, those of the recipe included, by flag (without the leading dashes)."""
    flat = {**settings.get("recipe", {}), **settings}
    flat.pop("recipe", None)
    return {FLAG_NAMES.get(name, name.replace("_", "-")): value for name, value in flat.items()}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)
