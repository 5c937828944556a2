"""Supplies training text: this process writes it, or one beside it does. `--write-text` says which.

- first: this process writes all text before the first step.
- between: this process writes one more shard between two steps, whenever every sequence was used
  once.
- beside: another process writes text during the whole run. On a GPU this is faster: while one
  process waits for the launch of its kernels, the other's run.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, Protocol

import torch
from accelerate import Accelerator

from pass_exporter.model.fingerprint import model_fingerprint
from pass_exporter.model.load import LoadedModel, load_model
from pass_exporter.model.registry import resolve
from pass_exporter.progress import NotedStep, Progress, Step
from pass_runtime.bundle.integrity import cache_directory
from pass_runtime.errors import PassError
from pass_trainer.config import TrainConfig
from pass_trainer.corpus import read_sources
from pass_trainer.device_sizes import device_bytes, shard_size
from pass_trainer.distill import Distiller
from pass_trainer.text_writer import BundleTextWriter, TextWriter, TorchTextWriter

POLL_SECONDS = 0.2
"""The time between two looks for shards that another process writes."""
WhenWritten = Literal["first", "between", "beside"]


@dataclass(frozen=True)
class RunProcess:
    """One of the `count` processes of a run, which torchrun starts: its index and its device."""

    device: torch.device
    index: int
    count: int


class NoProgress:
    def phase(self, _name: str) -> NotedStep:
        return lambda _done, _total, _note="": None


class TextSupply(Protocol):
    """Lets training wait for shards of text, which `distiller` then reads from `directory`."""

    distiller: Distiller
    directory: Path

    def wait(self, count: int, progress: Step | None = None) -> None:
        """Return once the first `count` shards exist."""
        ...

    def check(self) -> None:
        """Raise PassError if no more text can come."""
        ...

    def close(self) -> None: ...


class WrittenHere:
    """Text that this process writes in `wait`. Of several processes, each writes its share of the
    shards."""

    def __init__(self, distiller: Distiller, directory: Path, accelerator: Accelerator) -> None:
        self.distiller, self.directory, self._accelerator = distiller, directory, accelerator

    def wait(self, count: int, progress: Step | None = None) -> None:
        own = range(self._accelerator.process_index, count, self._accelerator.num_processes)
        self.distiller.write_missing(self.directory, own, progress or NoProgress().phase(""))
        self._accelerator.wait_for_everyone()

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class WrittenBeside:
    """Text that another process writes, which ends with this process. check_deadline: is called
    again and again while this process waits, and may raise PassError."""

    def __init__(
        self,
        distiller: Distiller,
        directory: Path,
        config: TrainConfig,
        process: RunProcess,
        check_deadline: Callable[[], None],
    ) -> None:
        self.distiller, self.directory, self._check_deadline = distiller, directory, check_deadline
        # A forked process could use neither the GPU nor torch's threads.
        context = multiprocessing.get_context("spawn")
        self._errors, errors = context.Pipe(duplex=False)
        self._process = context.Process(target=write_beside, args=(config, process, errors))
        self._process.start()
        errors.close()

    def wait(self, count: int, progress: Step | None = None) -> None:
        while (existing := count_shards(self.distiller, self.directory)) < count:
            self.check()
            self._check_deadline()
            time.sleep(POLL_SECONDS)
        if progress:
            progress(existing, existing)

    def check(self) -> None:
        """Raise PassError if the process ended with an error."""
        if self._process.exitcode not in (None, 0):
            reason = f"it ended with code {self._process.exitcode}"
            if self._errors.poll():
                reason = self._errors.recv()
            raise PassError(f"the process that writes text: {reason}")

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def write_beside(config: TrainConfig, process: RunProcess, errors: Connection) -> None:
    """Write the shards of `process`, in a process of its own, until all exist or its parent
    ends. errors: gets the message of a PassError."""
    # Ctrl-C also reaches the parent process, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        if process.device.type == "cpu":  # Training has the other half of the cores.
            torch.set_num_threads(max(torch.get_num_threads() // 2, 1))
        loaded = load_model(resolve(config.model, config.revision), config.dtype)
        loaded.model.to(process.device)
        distiller, directory = make_distiller(config, loaded, process, NoProgress())
        shard = process.index
        while distiller.shard_count is None or shard < distiller.shard_count:
            distiller.write_missing(directory, [shard], lambda _done, _total: None)
            shard += process.count
    except PassError as error:
        errors.send(str(error))
        raise SystemExit(1) from None


def _end_with_parent() -> None:
    """End this process when the parent process has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def count_shards(distiller: Distiller, directory: Path) -> int:
    """Return the number of the first shard that does not exist, i.e. how many can be read."""
    count = 0
    while count != distiller.shard_count and distiller.exists(directory, count):
        count += 1
    return count


def make_supply(
    config: TrainConfig,
    loaded: LoadedModel,
    accelerator: Accelerator,
    progress: Progress,
    check_deadline: Callable[[], None],
) -> TextSupply:
    """Return the supply of a run. Raises PassError if a source of text gives no prompt.

    check_deadline: see `WrittenBeside`.
    """
    process = RunProcess(accelerator.device, accelerator.process_index, accelerator.num_processes)
    distiller, directory = make_distiller(config, loaded, process, progress)
    distiller.check()
    if when_written(config, accelerator.device) == "beside":
        return WrittenBeside(distiller, directory, config, process, check_deadline)
    return WrittenHere(distiller, directory, accelerator)


def when_written(config: TrainConfig, device: torch.device) -> WhenWritten:
    """Return when text is written. By default, beside training on a GPU. On a CPU, where training
    keeps all cores busy, first; or between steps if the run has --minutes."""
    if config.write_text != "auto":
        return config.write_text
    if device.type != "cpu":
        return "beside"
    return "first" if config.minutes is None else "between"


def make_distiller(
    config: TrainConfig, loaded: LoadedModel, process: RunProcess, progress: Progress
) -> tuple[Distiller, Path]:
    """Return the distiller of a run and the directory of its shards."""
    cache = cache_directory() / "distilled" / model_cache_key(loaded.model)
    memory = device_bytes(process.device)
    distiller = Distiller(
        _make_writer(config, loaded, cache, process, progress),
        loaded.tokenizer,
        loaded.eos_token_ids,
        read_sources(config.data),
        config.recipe,
        shard_size(memory, loaded.geometry, config.recipe.length),
    )
    return distiller, cache / distiller.directory_name


def _make_writer(
    config: TrainConfig, loaded: LoadedModel, cache: Path, process: RunProcess, progress: Progress
) -> TextWriter:
    if text_writer_name(config, process.device, process.count) == TorchTextWriter.name:
        return TorchTextWriter(loaded.model, loaded.eos_token_ids)
    return BundleTextWriter(
        config.model, cache, config.recipe.length, progress, revision=config.revision
    )


def text_writer_name(config: TrainConfig, device: torch.device, processes: int) -> str:
    """Return the name of the text writer. By default, the int8 bundle on a CPU; torch on a GPU, and
    with several processes, because each process would export the bundle."""
    if config.write_with != "auto":
        return config.write_with
    is_one_cpu = device.type == "cpu" and processes == 1
    return BundleTextWriter.name if is_one_cpu else TorchTextWriter.name


def model_cache_key(model: torch.nn.Module) -> str:
    """Return the name of the model's text cache: a hash of a sample of its weights, rounded to
    bfloat16 so that the name is the same for every --dtype."""
    sample = model_fingerprint(model).bfloat16().float().numpy()
    return hashlib.sha256(sample.tobytes()).hexdigest()[:16]
