"""Where training text comes from while training goes on: from this process, or from one beside it.

- first: all text is written before the first step, as long as it has an end.
- between: this process writes a shard more, between two steps, when every sequence was used once.
- beside: another process writes from the start to the end; a GPU is shared better so, as both wait
  for launches.
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
Way = Literal["first", "between", "beside"]


@dataclass(frozen=True)
class Place:
    """One of the processes of a run, and where it computes."""

    device: str
    process: int
    processes: int


class NoProgress:
    def phase(self, _name: str) -> NotedStep:
        return lambda _done, _total, _note="": None


class TextSupply(Protocol):
    """Shards of text. distiller, directory: for reading them."""

    distiller: Distiller
    directory: Path

    def wait(self, shards: int, progress: Step | None = None) -> None:
        """Return once the first `shards` shards exist."""
        ...

    def check(self) -> None:
        """Raise PassError if no more text can come."""
        ...

    def close(self) -> None: ...


class WrittenHere:
    """Text that this process writes when it is waited for; of several processes, its own part."""

    def __init__(self, distiller: Distiller, directory: Path, accelerator: Accelerator) -> None:
        self.distiller, self.directory, self._accelerator = distiller, directory, accelerator

    def wait(self, shards: int, progress: Step | None = None) -> None:
        own = range(self._accelerator.process_index, shards, self._accelerator.num_processes)
        self.distiller.write_missing(self.directory, own, progress or NoProgress().phase(""))
        self._accelerator.wait_for_everyone()

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class WrittenBeside:
    """Text of another process, which ends with this one. is_late: called while this one waits."""

    def __init__(
        self,
        distiller: Distiller,
        directory: Path,
        config: TrainConfig,
        place: Place,
        is_late: Callable[[], None],
    ) -> None:
        self.distiller, self.directory, self._is_late = distiller, directory, is_late
        # A forked process could use neither the GPU nor torch's threads.
        context = multiprocessing.get_context("spawn")
        self._errors, errors = context.Pipe(duplex=False)
        self._process = context.Process(target=write_beside, args=(config, place, errors))
        self._process.start()
        errors.close()

    def wait(self, shards: int, progress: Step | None = None) -> None:
        while (found := count_shards(self.distiller, self.directory)) < shards:
            self.check()
            self._is_late()
            time.sleep(POLL_SECONDS)
        if progress:
            progress(found, found)

    def check(self) -> None:
        """Raise PassError if the process ended with an error."""
        if self._process.exitcode not in (None, 0):
            reason = (
                self._errors.recv()
                if self._errors.poll()
                else f"it ended with code {self._process.exitcode}"
            )
            raise PassError(f"the process that writes text: {reason}")

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def write_beside(config: TrainConfig, place: Place, errors: Connection) -> None:
    """Write this place's shards, until all are there or the parent process ends."""
    # Ctrl-C goes to the other process, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        if torch.device(place.device).type == "cpu":  # The steps compute on the other cores.
            torch.set_num_threads(max(torch.get_num_threads() // 2, 1))
        loaded = load_model(resolve(config.model, config.revision), config.dtype)
        loaded.model.to(place.device)
        distiller, directory = make_distiller(config, loaded, place, NoProgress())
        shard = place.process
        while distiller.shard_count is None or shard < distiller.shard_count:
            distiller.write_missing(directory, [shard], lambda _done, _total: None)
            shard += place.processes
    except PassError as error:
        errors.send(str(error))
        raise SystemExit(1) from None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def count_shards(distiller: Distiller, directory: Path) -> int:
    """Return how many shards exist, from the first on without a gap."""
    count = 0
    while count != distiller.shard_count and distiller.exists(directory, count):
        count += 1
    return count


def make_supply(
    config: TrainConfig,
    loaded: LoadedModel,
    accelerator: Accelerator,
    progress: Progress,
    is_late: Callable[[], None],
) -> TextSupply:
    """Return the supply for `way_of(config)`. Raises PassError if no text gives prompts."""
    place = Place(str(accelerator.device), accelerator.process_index, accelerator.num_processes)
    distiller, directory = make_distiller(config, loaded, place, progress)
    distiller.check()
    if way_of(config, accelerator.device) == "beside":
        return WrittenBeside(distiller, directory, config, place, is_late)
    return WrittenHere(distiller, directory, accelerator)


def way_of(config: TrainConfig, device: torch.device) -> Way:
    """Return when text is written. auto: beside training on a GPU. On a CPU, whose cores are all
    busy in either case, first; between steps if the run has --minutes."""
    if config.write_text != "auto":
        return config.write_text
    if device.type != "cpu":
        return "beside"
    return "first" if config.minutes is None else "between"


def make_distiller(
    config: TrainConfig, loaded: LoadedModel, place: Place, progress: Progress
) -> tuple[Distiller, Path]:
    """Return the distiller of a run and the directory of its shards."""
    cache = cache_directory() / "distilled" / model_cache_key(loaded.model)
    memory = device_bytes(torch.device(place.device))
    distiller = Distiller(
        _make_writer(config, loaded, cache, place, progress),
        loaded.tokenizer,
        loaded.eos_token_ids,
        read_sources(config.data),
        config.recipe,
        shard_size(memory, loaded.geometry, config.recipe.length),
    )
    return distiller, cache / distiller.directory_name


def _make_writer(
    config: TrainConfig, loaded: LoadedModel, cache: Path, place: Place, progress: Progress
) -> TextWriter:
    if (
        text_writer_name(config, torch.device(place.device), place.processes)
        == TorchTextWriter.name
    ):
        return TorchTextWriter(loaded.model, loaded.eos_token_ids)
    return BundleTextWriter(
        config.model, cache, config.recipe.length, progress, revision=config.revision
    )


def text_writer_name(config: TrainConfig, device: torch.device, processes: int) -> str:
    """Return the writer's name. auto: the w8a8 bundle on a CPU; torch on a GPU or with several
    processes, because each process would export the bundle."""
    if config.write_with != "auto":
        return config.write_with
    return (
        BundleTextWriter.name if device.type == "cpu" and processes == 1 else TorchTextWriter.name
    )


def model_cache_key(model: torch.nn.Module) -> str:
    """Return a hash of a sample of the model's weights. It names the model's text cache."""
    sample = model_fingerprint(model).bfloat16().float().numpy()
    return hashlib.sha256(sample.tobytes()).hexdigest()[:16]
