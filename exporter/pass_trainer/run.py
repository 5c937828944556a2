"""One training run, start to end: load, distill, train, write."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator

from pass_exporter.model.fingerprint import base_sample
from pass_exporter.model.load import LoadedModel, load_model
from pass_exporter.model.lookahead import FILE_NAME, TrainingRecord, write_lookahead
from pass_exporter.model.registry import Source as ModelSource
from pass_exporter.model.registry import cache_directory, resolve
from pass_exporter.progress import NotedStep
from pass_runtime.errors import PassError
from pass_trainer.config import TrainConfig
from pass_trainer.corpus import Source, digest, read_sources
from pass_trainer.distill import Distiller, Sequences
from pass_trainer.drafter import Drafter
from pass_trainer.evaluate import Acceptance, measure
from pass_trainer.report import write_report
from pass_trainer.start import make_drafter
from pass_trainer.trainer import CHECKPOINT, History, Hooks, train
from pass_trainer.writer import BundleWriter, TorchWriter, Writer

RECORDED_TOOLS = ("pass-toolkit", "torch", "transformers", "accelerate")
MOST_HELD_OUT = 32
"""Sequences that are measured while training goes on."""


class Progress(Protocol):
    """Told when a phase starts; `step(done, total, note)` inside a phase whose length is known."""

    def phase(self, name: str) -> NotedStep: ...


@dataclass(frozen=True)
class TrainReport:
    """What a run wrote, and how its drafts do on sequences it was not trained on."""

    weights: Path
    history: History
    acceptance: Acceptance


def run(config: TrainConfig, progress: Progress) -> TrainReport:
    """Train look-ahead weights. Raises PassError for what the user can mend; finished work stays for --resume."""
    prepare_output(config)
    sources = read_sources(config.data)
    accelerator = make_accelerator(config.device)
    source = resolve(config.model)
    progress.phase(f"loading {source.name}")
    loaded = load_model(source, config.dtype)
    check_length(config.recipe.length, source.name, loaded)
    loaded.model.to(accelerator.device)
    data, held_out = split(distill(config, loaded, sources, accelerator, progress))
    drafter = make_drafter(config, loaded).to(accelerator.device)
    steps_done = progress.phase("training")

    def on_step(step: int, loss: float) -> None:
        steps_done(step, config.steps, f"loss {loss:.3f}")

    def on_evaluate(current: Drafter, step: int) -> dict[str, Any]:
        return {"step": step} | measure(current, held_out, config.lookahead).as_json()

    history = train(config, accelerator, drafter, data, Hooks(on_step, on_evaluate))
    acceptance = measure(drafter, held_out, config.lookahead)
    weights = config.output / FILE_NAME
    if accelerator.is_main_process:
        record = make_record(config, source, digest(sources), accelerator.num_processes, acceptance)
        write_lookahead(weights, drafter.lookahead, drafter.adapter, drafter.head, base_sample(loaded.model), record)
        write_report(config.output, record, history, acceptance)
    accelerator.wait_for_everyone()
    return TrainReport(weights, history, acceptance)


def prepare_output(config: TrainConfig) -> None:
    """Refuse to train over another run."""
    if not config.resume and any((config.output / name).exists() for name in (FILE_NAME, CHECKPOINT)):
        raise PassError(f"{config.output} holds a training run; continue it with --resume, or give another -o")
    try:
        config.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PassError(f"cannot write to {config.output}: {error.strerror}") from None


def check_length(length: int, name: str, loaded: LoadedModel) -> None:
    """Refuse sequences that are longer than the model's."""
    longest = loaded.geometry.max_capacity
    if length > longest:
        raise PassError(f"--sequence-length must be at most {longest}, the longest sequence of {name}, not {length}")


def make_accelerator(device: str) -> Accelerator:
    """auto: the GPU where there is one; under torchrun every process gets its own."""
    if device not in ("auto", "cpu", "cuda"):
        raise PassError(f"--device must be auto, cpu or cuda, not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise PassError("--device cuda: torch finds no NVIDIA GPU; install a CUDA build of torch, or use --device cpu")
    return Accelerator(cpu=device == "cpu" or not torch.cuda.is_available())


def distill(
    config: TrainConfig,
    loaded: LoadedModel,
    sources: Sequence[Source | None],
    accelerator: Accelerator,
    progress: Progress,
) -> Sequences:
    """The run's sequences; processes share the work, what is in the cache is not made again."""
    cache = cache_directory() / "distilled" / fingerprint(loaded.model)
    writer = make_writer(config, loaded, cache, accelerator, progress)
    distiller = Distiller(writer, loaded.tokenizer, loaded.eos_token_ids, sources, config.recipe)
    directory = cache / distiller.name
    mine = range(accelerator.process_index, distiller.shards, accelerator.num_processes)
    distiller.generate(directory, mine, progress.phase("writing training text"))
    accelerator.wait_for_everyone()
    return distiller.read(directory)


def make_writer(
    config: TrainConfig, loaded: LoadedModel, cache: Path, accelerator: Accelerator, progress: Progress
) -> Writer:
    """auto: the w8a8 bundle on a CPU, torch on a GPU, and with several processes, which would export it all at once."""
    by_torch = accelerator.device.type != "cpu" or accelerator.num_processes > 1
    if config.write_with == "torch" or (config.write_with == "auto" and by_torch):
        return TorchWriter(loaded.model, loaded.eos_token_ids)
    return BundleWriter(config.model, cache, config.recipe.length, progress)


def fingerprint(model: torch.nn.Module) -> str:
    """Names the cache of a model's writing."""
    sample = base_sample(model).bfloat16().float().numpy()
    return hashlib.sha256(sample.tobytes()).hexdigest()[:16]


def split(sequences: Sequences) -> tuple[Sequences, Sequences]:
    """(training, held out): the first sixteenth, at most MOST_HELD_OUT, is never trained on."""
    count = min(max(len(sequences) // 16, 1), MOST_HELD_OUT)
    return sequences.part(slice(count, None)), sequences.part(slice(count))


def make_record(
    config: TrainConfig, source: ModelSource, text: str, processes: int, acceptance: Acceptance
) -> TrainingRecord:
    recipe = config.what_is_trained() | {
        "data": [path.name for path in config.data],
        "data_sha256": text,
        "processes": processes,
    }
    return TrainingRecord(
        base=source.description,
        lookahead=config.lookahead,
        adapter=config.adapter,
        rank=config.rank if config.adapter != "none" else 0,
        head_rank=config.head_rank if config.head else 0,
        head_width=config.head_width if config.head else 0,
        steps=config.steps,
        recipe=recipe,
        tools={name: version(name) for name in RECORDED_TOOLS} | {"python": platform.python_version()},
        acceptance=tuple(round(share, 4) for share in acceptance.chain),
    )


def is_main() -> bool:
    """Whether this process talks to the terminal (torchrun starts several)."""
    return os.environ.get("RANK", "0") == "0"
