"""A training run: loads the model, writes training text, trains, and writes the weights."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
from pass_runtime.bundle.integrity import cache_directory
from pass_runtime.errors import PassError
from pass_trainer.checkpoint import CHECKPOINT, Checkpoint, History, find_checkpoint
from pass_trainer.config import MAX_HELD_OUT, TrainConfig
from pass_trainer.corpus import TextSource, digest, read_sources
from pass_trainer.distill import Distiller, Sequences
from pass_trainer.drafter import Drafter
from pass_trainer.held_out import Agreement, measure
from pass_trainer.initial_drafter import make_drafter
from pass_trainer.report import write_report
from pass_trainer.text_writer import BundleTextWriter, TextWriter, TorchTextWriter
from pass_trainer.trainer import Hooks, train

RECORDED_TOOLS = ("pass-toolkit", "torch", "transformers", "accelerate")


class TrainProgress(Protocol):
    """Shows the phases of a run. If a phase has a known length, the run calls its NotedStep after every step."""

    def phase(self, name: str) -> NotedStep: ...


@dataclass(frozen=True)
class TrainReport:
    """The weights file of a run, its history, and the agreement on its held-out sequences."""

    weights: Path
    history: History
    agreement: Agreement


def run(config: TrainConfig, progress: TrainProgress) -> TrainReport:
    """Train look-ahead weights. Raises PassError for errors that the user can correct."""
    check_output(config)
    sources = read_sources(config.data)
    accelerator = make_accelerator(config.device)
    text = digest(sources)
    settings = config.resume_settings() | {"data_sha256": text, "write_with": text_writer_name(config, accelerator)}
    checkpoint = Checkpoint(config.output, settings, accelerator, config.checkpoint_minutes)
    checkpoint.check()
    source = resolve(config.model, config.revision)
    progress.phase(f"loading {source.name}")
    loaded = load_model(source, config.dtype)
    check_length(config.recipe.length, source.name, loaded)
    drafter = make_drafter(config, loaded)  # It may raise PassError, so it is made before hours of writing text.
    loaded.model.to(accelerator.device)
    make_output(config)
    data, held_out = split(distill(config, loaded, sources, accelerator, progress), config.held_out)
    drafter.to(accelerator.device)
    steps_done = progress.phase("training")

    def on_step(step: int, loss: float) -> None:
        steps_done(step, config.steps, f"loss {loss:.3f}")

    def on_evaluate(current: Drafter, step: int) -> dict[str, Any]:
        return {"step": step} | measure(current, held_out, config.lookahead).as_json()

    history = train(config, accelerator, drafter, data, Hooks(on_step, on_evaluate), checkpoint)
    agreement = measure(drafter, held_out, config.lookahead)
    weights = config.output / FILE_NAME
    if accelerator.is_main_process:
        record = make_record(config, source, settings, drafter, history, accelerator.num_processes, agreement)
        base = model_fingerprint(loaded.model)
        write_lookahead(weights, drafter.lookahead, drafter.adapter, drafter.head, base, record)
        write_report(config.output, record, history, agreement)
    accelerator.wait_for_everyone()
    return TrainReport(weights, history, agreement)


def check_output(config: TrainConfig) -> None:
    """Raise PassError if `output` has a run and `resume` is off, or has weights without a checkpoint."""
    trained = (config.output / FILE_NAME).exists()
    resumable = find_checkpoint(config.output / CHECKPOINT) is not None
    if not config.resume and (trained or resumable):
        raise PassError(f"{config.output} holds a training run; continue it with --resume, or give another -o")
    if config.resume and trained and not resumable:
        weights = config.output / FILE_NAME
        raise PassError(f"{config.output} has no checkpoint to resume from; use --start {weights}, and another -o")


def make_output(config: TrainConfig) -> None:
    try:
        config.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PassError(f"cannot write to {config.output}: {error.strerror}") from None


def check_length(length: int, name: str, loaded: LoadedModel) -> None:
    """Raise PassError if sequences are longer than the model allows."""
    longest = loaded.geometry.max_capacity
    if length > longest:
        raise PassError(f"--sequence-length must be at most {longest}, the longest sequence of {name}, not {length}")


def make_accelerator(device: str) -> Accelerator:
    """Return the accelerator for --device. auto: the GPU if there is one; under torchrun each process has its own."""
    if device not in ("auto", "cpu", "cuda"):
        raise PassError(f"--device must be auto, cpu or cuda, not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise PassError("--device cuda: torch finds no NVIDIA GPU; install a CUDA build of torch, or use --device cpu")
    return Accelerator(cpu=device == "cpu" or not torch.cuda.is_available())


def distill(
    config: TrainConfig,
    loaded: LoadedModel,
    sources: Sequence[TextSource | None],
    accelerator: Accelerator,
    progress: TrainProgress,
) -> Sequences:
    """Return all sequences of the run. Each process first writes its part of the missing shards."""
    cache = cache_directory() / "distilled" / model_cache_key(loaded.model)
    writer = make_text_writer(config, loaded, cache, accelerator, progress)
    distiller = Distiller(writer, loaded.tokenizer, loaded.eos_token_ids, sources, config.recipe)
    distiller.check()
    directory = cache / distiller.directory_name
    own_shards = range(accelerator.process_index, distiller.shard_count, accelerator.num_processes)
    distiller.write_missing(directory, own_shards, progress.phase("writing training text"))
    accelerator.wait_for_everyone()
    return distiller.read(directory)


def make_text_writer(
    config: TrainConfig, loaded: LoadedModel, cache: Path, accelerator: Accelerator, progress: TrainProgress
) -> TextWriter:
    if text_writer_name(config, accelerator) == TorchTextWriter.name:
        return TorchTextWriter(loaded.model, loaded.eos_token_ids)
    return BundleTextWriter(config.model, cache, config.recipe.length, progress, revision=config.revision)


def text_writer_name(config: TrainConfig, accelerator: Accelerator) -> str:
    """Return the writer's name. auto: the w8a8 bundle on a CPU; torch on a GPU or with several processes, because each
    process would export the bundle."""
    if config.write_with != "auto":
        return config.write_with
    on_one_cpu = accelerator.device.type == "cpu" and accelerator.num_processes == 1
    return BundleTextWriter.name if on_one_cpu else TorchTextWriter.name


def model_cache_key(model: torch.nn.Module) -> str:
    """Return a hash of a sample of the model's weights. It names the cache of texts that the model writes."""
    sample = model_fingerprint(model).bfloat16().float().numpy()
    return hashlib.sha256(sample.tobytes()).hexdigest()[:16]


def split(sequences: Sequences, held_out: int | None = None) -> tuple[Sequences, Sequences]:
    """Return (training, held out). The first `held_out` are held out; by default a sixteenth, at most MAX_HELD_OUT."""
    count = held_out or min(max(len(sequences) // 16, 1), MAX_HELD_OUT)
    return sequences.part(slice(count, None)), sequences.part(slice(count))


def make_record(
    config: TrainConfig,
    source: ModelSource,
    settings: dict[str, Any],
    drafter: Drafter,
    history: History,
    processes: int,
    agreement: Agreement,
) -> TrainingRecord:
    recipe = settings | {
        "data": [path.name for path in config.data],
        "processes": processes,
        "stages": [asdict(stage) for stage in history.stages],
    }
    return TrainingRecord(
        base=source.description,
        lookahead=config.lookahead,
        adapter=config.adapter,
        rank=config.rank if config.adapter != "none" else 0,
        head_rank=drafter.head.rank if drafter.head else 0,
        head_width=drafter.head.width if drafter.head else 0,
        steps=config.steps,
        recipe=recipe,
        tools={name: version(name) for name in RECORDED_TOOLS} | {"python": platform.python_version()},
        acceptance=tuple(round(share, 4) for share in agreement.cumulative),
    )


def is_main() -> bool:
    """Return whether this is the one of torchrun's processes that writes to the terminal."""
    return os.environ.get("RANK", "0") == "0"
