"""Runs a training: loads the model, writes training text, trains, and writes the weights."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from pass_exporter.model.load import LoadedModel, load_model
from pass_exporter.model.lookahead import (
    FILE_NAME,
    TrainingRecord,
    model_fingerprint,
    write_lookahead,
)
from pass_exporter.model.registry import ModelSource, resolve
from pass_exporter.progress import NotedStep, Progress
from pass_runtime.bundle.integrity import cache_directory
from pass_runtime.errors import PassError
from pass_trainer.checkpoint import CHECKPOINT, Checkpoint, Clock, History, find_checkpoint
from pass_trainer.config import MAX_HELD_OUT, TrainConfig
from pass_trainer.corpus import TextSource, digest, read_sources
from pass_trainer.drafter import Drafter
from pass_trainer.held_out import Agreement, measure
from pass_trainer.initial import make_drafter
from pass_trainer.report import write_report
from pass_trainer.sizes import batch_size, device_bytes, shard_size
from pass_trainer.text import Distiller
from pass_trainer.train import Schedule, train
from pass_trainer.writers import BundleTextWriter, TextWriter, TorchTextWriter

CHECKPOINTS = 10
"""Of a run with --minutes, at least."""
RECORDED_TOOLS = ("pass-toolkit", "torch", "transformers", "accelerate")


@dataclass(frozen=True)
class TrainReport:
    weights: Path
    history: History
    agreement: Agreement


def run(config: TrainConfig, progress: Progress, clock: Clock = time.monotonic) -> TrainReport:
    """Train look-ahead weights. Raises PassError for a user's errors. clock: times the run."""
    schedule = Schedule(config.steps, config.minutes, clock)
    check_output(config)
    sources = read_sources(config.data)
    accelerator = make_accelerator(config.device)
    source = resolve(config.model, config.revision)
    if accelerator.device.type == "cpu":
        # Here the batch size does not depend on the model, so settings are checked before loading.
        config = replace(config, batch=config.batch or 1)
        make_checkpoint(config, digest(sources), accelerator, clock).check()
    progress.phase(f"loading {source.name}")
    loaded = load_model(source, config.dtype)
    memory, inner = device_bytes(accelerator.device), int(loaded.model.config.intermediate_size)
    batch = config.batch or batch_size(memory, loaded.geometry, inner, config)
    config = replace(config, batch=batch)
    checkpoint = make_checkpoint(config, digest(sources), accelerator, clock)
    longest = loaded.geometry.max_capacity
    if config.recipe.sequence_length > longest:
        raise PassError(
            f"--sequence-length must be at most {longest}, the longest sequence of {source.name}, "
            f"not {config.recipe.sequence_length}"
        )
    # `make_drafter` may raise PassError, so it comes before hours of writing text.
    drafter = make_drafter(config, loaded)
    loaded.model.to(accelerator.device)
    try:
        config.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PassError(f"cannot write to {config.output}: {error.strerror}") from None
    drafter.to(accelerator.device)
    distiller, directory = make_distiller(config, sources, loaded, accelerator, progress)
    distiller.check()
    history = checkpoint.read()
    written = progress.phase("writing training text")
    history.shards = write_text(
        distiller, directory, accelerator, schedule, history.shards, written
    )
    text = distiller.read(directory, range(history.shards))
    count = config.held_out or default_held_out(distiller)
    if count >= len(text):
        raise PassError(
            f"--held-out {count} leaves none of the {len(text)} written sequences to train on; "
            "give fewer, or more --minutes"
        )
    held_out, training_text = text.part(slice(count)), text.part(slice(count, None))
    measured: dict[int, Agreement] = {}

    def evaluate(step: int) -> dict[str, Any]:
        measured[step] = measure(drafter, held_out, config.lookahead)
        return {"step": step} | measured[step].as_json()

    shown = progress.phase("training")

    def on_step(step: int, share: float, loss: float) -> None:
        if config.steps is not None:
            shown(step, config.steps, f"loss {loss:.3f}")
        else:  # The number of steps is not known, so the bar shows the share in thousandths.
            shown(int(1000 * share), 1000, f"step {step}, loss {loss:.3f}")

    train(
        config,
        accelerator,
        drafter,
        training_text,
        on_step,
        evaluate,
        checkpoint,
        schedule,
        history,
    )
    steps = len(history.loss)
    if steps not in measured:  # The run was resumed at its end.
        evaluate(steps)
    weights, agreement = config.output / FILE_NAME, measured[steps]
    if accelerator.is_main_process:
        stages = [
            {k: v for k, v in asdict(stage).items() if v is not None} for stage in history.stages
        ]
        sizes = {"sequences": len(text), "processes": accelerator.num_processes}
        settings = checkpoint.settings | sizes | {"stages": stages}
        record = make_record(config, source, settings, drafter, steps, agreement)
        base = model_fingerprint(loaded.model)
        write_lookahead(weights, drafter.embeddings, drafter.adapter, drafter.head, base, record)
        write_report(config.output, record, history, agreement)
    accelerator.wait_for_everyone()
    return TrainReport(weights, history, agreement)


def make_checkpoint(
    config: TrainConfig, data_hash: str, accelerator: Accelerator, clock: Clock
) -> Checkpoint:
    """data_hash: the `digest` of the run's sources."""
    writer = text_writer_name(config, accelerator)
    settings = config.resume_settings() | {"data_sha256": data_hash, "write_with": writer}
    minutes = config.checkpoint_minutes
    if config.minutes is not None:
        minutes = min(minutes, config.minutes / CHECKPOINTS)
    return Checkpoint(config.output, settings, accelerator, minutes, clock)


def make_distiller(
    config: TrainConfig,
    sources: Sequence[TextSource | None],
    loaded: LoadedModel,
    accelerator: Accelerator,
    progress: Progress,
) -> tuple[Distiller, Path]:
    """Return the distiller of a run and the directory of its shards."""
    cache = cache_directory() / "distilled" / model_cache_key(loaded.model)
    length = config.recipe.sequence_length
    writer: TextWriter = TorchTextWriter(loaded.model, loaded.eos_token_ids)
    if text_writer_name(config, accelerator) == BundleTextWriter.name:
        writer = BundleTextWriter(config.model, cache, length, progress, revision=config.revision)
    distiller = Distiller(
        writer,
        loaded.tokenizer,
        loaded.eos_token_ids,
        sources,
        config.recipe,
        shard_size(device_bytes(accelerator.device), loaded.geometry, length),
    )
    return distiller, cache / distiller.directory_name


def text_writer_name(config: TrainConfig, accelerator: Accelerator) -> str:
    """By default the int8 bundle on a CPU; torch on a GPU, and with several processes, because each
    would export the bundle."""
    if config.write_with != "auto":
        return config.write_with
    is_one_cpu = accelerator.device.type == "cpu" and accelerator.num_processes == 1
    return BundleTextWriter.name if is_one_cpu else TorchTextWriter.name


def model_cache_key(model: torch.nn.Module) -> str:
    """Return a hash of a sample of the weights, the same for every --dtype."""
    sample = model_fingerprint(model).bfloat16().float().numpy()
    return hashlib.sha256(sample.tobytes()).hexdigest()[:16]


def default_held_out(distiller: Distiller) -> int:
    """Return a sixteenth of all sequences, or an eighth of a shard if their number is open."""
    sequences = distiller.recipe.sequences
    share = distiller.shard_size // 8 if sequences is None else sequences // 16
    return min(max(share, 1), MAX_HELD_OUT)


def write_text(
    distiller: Distiller,
    directory: Path,
    accelerator: Accelerator,
    schedule: Schedule,
    shards: int,
    progress: NotedStep,
) -> int:
    """Write the shards that are missing, every process its share. Return the number of all, which
    with --minutes the time decides. shards: of a resumed run; 0 for a new one."""
    limit, count = shards or distiller.shard_count, 0
    while count != limit:
        if schedule.by_clock and not shards and count:
            has_time = [schedule.has_time_for_text()]
            if accelerator.num_processes > 1:
                broadcast_object_list(has_time)
            if not has_time[0]:
                break
        end = count + accelerator.num_processes
        end = end if limit is None else min(end, limit)
        own = range(count + accelerator.process_index, end, accelerator.num_processes)
        distiller.write_missing(directory, own)
        count, total = end, distiller.recipe.sequences
        done = min(count * distiller.shard_size, total or count * distiller.shard_size)
        progress(done, total or done)
    accelerator.wait_for_everyone()
    return count


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
    agreement: Agreement,
) -> TrainingRecord:
    tools = {name: version(name) for name in RECORDED_TOOLS}
    return TrainingRecord(
        base=source.description,
        lookahead=config.lookahead,
        adapter=config.adapter,
        rank=config.rank if config.adapter != "none" else 0,
        head_rank=drafter.head.rank if drafter.head else 0,
        head_width=drafter.head.width if drafter.head else 0,
        steps=steps,
        recipe=settings | {"data": [path.name for path in config.data]},
        tools=tools | {"python": platform.python_version()},
        acceptance=tuple(round(share, 4) for share in agreement.cumulative),
    )


def is_main() -> bool:
    """Return whether this process, torchrun's first, writes to the terminal."""
    return os.environ.get("RANK", "0") == "0"
