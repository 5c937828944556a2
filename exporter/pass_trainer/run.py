"""Runs a training: loads the model, writes training text, trains, and writes the weights."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator

from pass_exporter.model.fingerprint import model_fingerprint
from pass_exporter.model.load import LoadedModel, load_model
from pass_exporter.model.lookahead import FILE_NAME, TrainingRecord, write_lookahead
from pass_exporter.model.registry import ModelSource, resolve
from pass_exporter.progress import NotedStep
from pass_runtime.errors import PassError
from pass_trainer.checkpoint import CHECKPOINT, Checkpoint, History, find_checkpoint
from pass_trainer.config import TrainConfig
from pass_trainer.corpus import digest, read_sources
from pass_trainer.device_sizes import batch_size, device_bytes
from pass_trainer.drafter import Drafter
from pass_trainer.held_out import Agreement, measure
from pass_trainer.initial_drafter import make_drafter
from pass_trainer.report import write_report
from pass_trainer.schedule import Clock, Schedule
from pass_trainer.text_supply import make_supply, text_writer_name, when_written
from pass_trainer.trainer import Hooks, train
from pass_trainer.training_text import TrainingText

CHECKPOINTS = 10
"""A run with --minutes makes at least so many checkpoints."""
RECORDED_TOOLS = ("pass-toolkit", "torch", "transformers", "accelerate")
"""The packages whose versions the weights file records."""


class TrainProgress(Protocol):
    """Shows the phases of a run. A phase's NotedStep is called after every step."""

    def phase(self, name: str) -> NotedStep: ...


@dataclass(frozen=True)
class TrainReport:
    """The weights file of a run, its history, and the agreement on its held-out sequences."""

    weights: Path
    history: History
    agreement: Agreement


def run(config: TrainConfig, progress: TrainProgress, clock: Clock = time.monotonic) -> TrainReport:
    """Train look-ahead weights. Raises PassError for a user's errors. clock: times the run."""
    schedule = Schedule(config.steps, config.minutes, clock)
    check_output(config)
    data_hash = digest(read_sources(config.data))
    accelerator = make_accelerator(config.device)
    source = resolve(config.model, config.revision)
    if accelerator.device.type == "cpu":
        # Here the batch size does not depend on the model, so settings are checked before loading.
        config = replace(config, batch=config.batch or 1)
        make_checkpoint(config, data_hash, accelerator, clock).check()
    progress.phase(f"loading {source.name}")
    loaded = load_model(source, config.dtype)
    config = replace(
        config, batch=config.batch or fitting_batch(config, loaded, accelerator.device)
    )
    checkpoint = make_checkpoint(config, data_hash, accelerator, clock)
    checkpoint.check()
    check_length(config.recipe.length, source.name, loaded)
    # `make_drafter` may raise PassError, so it comes before hours of writing text.
    drafter = make_drafter(config, loaded)
    loaded.model.to(accelerator.device)
    make_output(config)
    drafter.to(accelerator.device)
    supply = make_supply(config, loaded, accelerator, progress, schedule.check_text_in_time)
    try:
        data = TrainingText(
            supply,
            when_written(config, accelerator.device),
            schedule,
            held_out=config.held_out,
            seed=config.seed,
            processes=accelerator.num_processes,
        )
        measured: dict[int, Agreement] = {}
        hooks = make_hooks(config, data, progress, measured)
        history = train(config, accelerator, drafter, data, hooks, checkpoint, schedule)
    finally:
        supply.close()
    steps = len(history.loss)
    # A run that was resumed at its end has measured nothing.
    agreement = measured.get(steps) or measure(drafter, data.held_out, config.lookahead)
    weights = config.output / FILE_NAME
    if accelerator.is_main_process:
        settings = checkpoint.settings | {
            "sequences": len(data.sequences),
            "stages": shown_stages(history),
        }
        record = make_record(
            config, source, settings, drafter, steps, accelerator.num_processes, agreement
        )
        base = model_fingerprint(loaded.model)
        write_lookahead(weights, drafter.embeddings, drafter.adapter, drafter.head, base, record)
        write_report(config.output, record, history, agreement)
    accelerator.wait_for_everyone()
    return TrainReport(weights, history, agreement)


def make_checkpoint(
    config: TrainConfig, data_hash: str, accelerator: Accelerator, clock: Clock
) -> Checkpoint:
    """Return the checkpoint of a run. data_hash: the `digest` of its sources."""
    writer = text_writer_name(config, accelerator.device, accelerator.num_processes)
    settings = config.resume_settings() | {"data_sha256": data_hash, "write_with": writer}
    minutes = config.checkpoint_minutes
    if config.minutes is not None:
        minutes = min(minutes, config.minutes / CHECKPOINTS)
    return Checkpoint(config.output, settings, accelerator, minutes, clock)


def fitting_batch(config: TrainConfig, loaded: LoadedModel, device: torch.device) -> int:
    return batch_size(
        device_bytes(device), loaded.geometry, int(loaded.model.config.intermediate_size), config
    )


def make_hooks(
    config: TrainConfig, data: TrainingText, progress: TrainProgress, measured: dict[int, Agreement]
) -> Hooks:
    """Return hooks that show the progress and measure held-out sequences.

    measured: every measurement is put here, under the number of steps before it.
    """
    phases: dict[str, NotedStep] = {}

    def show(phase: str, done: int, total: int, note: str = "") -> None:
        if phase not in phases:
            phases[phase] = progress.phase(phase)
        phases[phase](done, total, note)

    def on_step(step: int, share: float, loss: float) -> None:
        note = f"loss {loss:.3f}"
        if config.steps is not None:
            show("training", step, config.steps, note)
        else:  # The number of steps is not known, so the bar shows the share in thousandths.
            note = f"step {step}, {note}, {len(data.sequences)} sequences"
            show("training", int(1000 * share), 1000, note)

    def on_evaluate(drafter: Drafter, step: int) -> dict[str, Any]:
        measured[step] = measure(drafter, data.held_out, config.lookahead)
        return {"step": step} | measured[step].as_json()

    return Hooks(
        lambda done, total: show("writing training text", done, total), on_step, on_evaluate
    )


def shown_stages(history: History) -> list[dict[str, Any]]:
    """Return the stages as JSON for the weights file, without fields that are None."""
    return [{k: v for k, v in asdict(stage).items() if v is not None} for stage in history.stages]


def check_output(config: TrainConfig) -> None:
    """Raise PassError if `output` holds a run that is not to be resumed, or that cannot be."""
    weights = config.output / FILE_NAME
    has_checkpoint = find_checkpoint(config.output / CHECKPOINT) is not None
    if not config.resume and (weights.exists() or has_checkpoint):
        raise PassError(
            f"{config.output} holds a training run; continue it with --resume, or give another -o"
        )
    if config.resume and weights.exists() and not has_checkpoint:
        raise PassError(
            f"{config.output} has no checkpoint to resume from; use --start {weights}, and "
            "another -o"
        )


def make_output(config: TrainConfig) -> None:
    try:
        config.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PassError(f"cannot write to {config.output}: {error.strerror}") from None


def check_length(length: int, name: str, loaded: LoadedModel) -> None:
    """Raise PassError if sequences are longer than the model allows."""
    max_length = loaded.geometry.max_capacity
    if length > max_length:
        raise PassError(
            f"--sequence-length must be at most {max_length}, the longest sequence of {name}, not "
            f"{length}"
        )


def make_accelerator(device: str) -> Accelerator:
    """Return the accelerator for --device. `auto` takes a GPU if there is one."""
    if device not in ("auto", "cpu", "cuda"):
        raise PassError(f"--device must be auto, cpu or cuda, not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise PassError(
            "--device cuda: torch finds no NVIDIA GPU; install a CUDA build of torch, or use "
            "--device cpu"
        )
    return Accelerator(cpu=device == "cpu" or not torch.cuda.is_available())


def make_record(
    config: TrainConfig,
    source: ModelSource,
    settings: dict[str, Any],
    drafter: Drafter,
    steps: int,
    processes: int,
    agreement: Agreement,
) -> TrainingRecord:
    """Return what the weights file says of its training. settings: the settings of the run."""
    recipe = settings | {"data": [path.name for path in config.data], "processes": processes}
    return TrainingRecord(
        base=source.description,
        lookahead=config.lookahead,
        adapter=config.adapter,
        rank=config.rank if config.adapter != "none" else 0,
        head_rank=drafter.head.rank if drafter.head else 0,
        head_width=drafter.head.width if drafter.head else 0,
        steps=steps,
        recipe=recipe,
        tools={name: version(name) for name in RECORDED_TOOLS}
        | {"python": platform.python_version()},
        acceptance=tuple(round(share, 4) for share in agreement.cumulative),
    )


def is_main() -> bool:
    """Return whether this is the process of a run that writes to the terminal: torchrun's first."""
    return os.environ.get("RANK", "0") == "0"
