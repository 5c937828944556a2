"""The time of a pass over several rows of a 7B-shaped model, and how near it comes to the bandwidth of the memory.

    python scripts/step_time.py --engine tensorrt --keep build/step-time -o step_time.json

Drafting pays if a pass over a few rows takes about as long as one over a single row, since both read every weight once.
This script needs no model and no bundle: it times the trunk of a Llama with random fp16 weights, whose sizes are flags,
by rows and KV capacity. It prints milliseconds (medians), the ratio to the pass with the fewest rows, and the fraction
of the bandwidth bound: the time that reading the weights and the KV cache takes at the copy bandwidth measured in the
same run, over the time of the pass. For a bundle, `pass-run bench --rows` has the times.

TensorRT's engines have a KV cache of the largest capacity, of which a pass reads the first entries of each head.
Whether that is a copy shows in the last figure of the other capacities: milliseconds with a cache of just their size.
If that is much less, engines for short texts are better built with a --max-seq-len of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from pass_runtime.backends.base import Backend
from pass_runtime.backends.cuda import ON_DEVICE, Cuda, call, find_device, import_api, why_no_device
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.backends.trt.backend import TrtBackend
from pass_runtime.backends.trt.library import LIBRARIES, Library, import_library
from pass_runtime.bundle.manifest import (
    DerivedTrunk,
    EngineFile,
    EngineSet,
    Graph,
    LookaheadInfo,
    Manifest,
    ModelInfo,
    Profile,
)
from pass_runtime.bundle.plan import prefill_plan
from pass_runtime.bundle.tensors import COLUMNS
from pass_runtime.cli.bench import write_json
from pass_runtime.cli.command_errors import one_line_errors
from pass_runtime.cli.tables import show_rows
from pass_runtime.errors import PassError
from pass_runtime.files import write_whole
from pass_runtime.measuring.real_use import in_turns

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pass_exporter.engines.builder import Source

TRUNK, GRAPH = "trunk.onnx", "graph.json"
WARM_UP, COPY_ROUNDS, COPIES = 2, 10, 5
STD, FP16 = 0.02, 2
"""The standard deviation of the weights; the bytes of a number."""
COPIED = {"gpu": 1 << 30, "cpu": 1 << 28}
"""Bytes of a copy: more than the caches of a processor hold."""
LOOKAHEAD, MAX_CAPACITY = 4, 1 << 20
"""What the manifest of the trunk states."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama, named as in Hugging Face's configuration; the defaults are LLaMA-7B's. The embeddings and
    the LM head are separate tensors."""

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    vocab_size: int = 32000

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that a pass reads: all but the embeddings, of which it reads a few rows."""
        attention = 2 * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        layer = self.hidden_size * (attention + 3 * self.intermediate_size + 2)
        return FP16 * (self.num_hidden_layers * layer + self.hidden_size * (1 + self.vocab_size))

    @property
    def model(self) -> ModelInfo:
        """The fields of a manifest that a backend reads."""
        heads = {"heads": self.num_attention_heads, "kv_heads": self.num_key_value_heads, "head_dim": self.head_dim}
        sizes = {"vocab_size": self.vocab_size, "hidden_size": self.hidden_size, "layers": self.num_hidden_layers}
        numbers = {"dtype": "float16", "weights": "full", "max_capacity": MAX_CAPACITY}
        return ModelInfo.model_construct(**heads, **sizes, **numbers)

    def cache_bytes(self, capacity: int) -> int:
        """Return the bytes of the keys and values of one sequence."""
        return FP16 * 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * capacity


def write_trunk(keep: Path, shape: Shape) -> Path:
    """Return the directory under `keep` with the trunk of this shape, which is traced and saved if it does not
    exist."""
    directory = keep / "-".join(["llama", *map(str, astuple(shape))])
    if not (directory / GRAPH).is_file():
        import torch

        from pass_exporter.bundle import describe, graph_info
        from pass_exporter.model.lookahead import Lookahead
        from pass_exporter.staging import staged_directory
        from pass_exporter.trunk.graph import save
        from pass_exporter.trunk.trace import trace_trunk

        with staged_directory(directory, force=False) as staging:
            lookahead = Lookahead(torch.zeros(LOOKAHEAD, shape.hidden_size), False, "random")
            graph, _ = trace_trunk(random_llama(shape), lookahead)
            describe(graph, shape.model, LOOKAHEAD, "match")
            save(graph, staging / TRUNK)
            (staging / GRAPH).write_text(graph_info(graph, TRUNK).model_dump_json(), encoding="utf-8")
    return directory


def random_llama(shape: Shape) -> PreTrainedModel:
    """Return a model in fp16. Every weight is a view at a random place of one pool of numbers, so that 7B need 0.3
    GB."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.for_model("llama", tie_word_embeddings=False, **asdict(shape))
    with torch.device("meta"):
        model = LlamaForCausalLM(config).half()
    largest = max(parameter.numel() for parameter in model.parameters())
    generator = torch.Generator().manual_seed(0)
    pool = torch.empty(2 * largest, dtype=torch.float16).normal_(0, STD, generator=generator)
    for name, parameter in list(model.named_parameters()):
        if parameter.ndim == 1:
            weight = torch.ones(parameter.shape, dtype=torch.float16)
        else:  # stored as MatMul reads it, so that saving does not transpose
            start = int(torch.randint(largest, (1,), generator=generator))
            weight = pool[start : start + parameter.numel()].view(*reversed(parameter.shape)).t()
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, torch.nn.Parameter(weight, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are not parameters
    return model.eval()


def engine_source(directory: Path, graph: Graph, rows: Sequence[int], capacities: Sequence[int], least: int) -> Source:
    """Return what an engine is built from, with one profile per cell of the table. The cache has the largest capacity,
    and a pass reads its first columns."""
    from pass_exporter.engines.build import trunk_source

    cells = [
        {"batch": 1, "width": max(q, least), "logit_rows": q, "lookahead_rows": 0, COLUMNS: columns}
        for columns in capacities
        for q in rows
    ]
    profiles = tuple(Profile(sizes={name: (n, n, n) for name, n in cell.items()}) for cell in cells)
    return trunk_source(directory / TRUNK, graph, max(capacities), profiles)


def build_engine(
    directory: Path, source: Source, library: Library, targets: tuple[str, ...], capacities: tuple[int, ...]
) -> EngineSet:
    """Return a set with the trunk's engine alone, in `directory`; the engine is built if it does not exist."""
    from pass_exporter.engines.builder import EngineBuilder

    builder = EngineBuilder(library, targets if library.builds_ahead else ())
    key = hashlib.sha256(repr((builder.version, targets, source.profiles)).encode()).hexdigest()
    unread = {"sha256": key, "bytes": 0, "profiles": source.profiles, "aliases": source.aliases}
    engines = EngineSet(
        directory=f"{library.name}-{key[:12]}",
        library=library.name,
        version=builder.version,
        targets=targets,
        bundle="",
        lookahead=1,
        max_batch_size=1,
        capacities=capacities,
        prefill_widths=(),
        engines=(EngineFile(graph=TRUNK, file="trunk.engine", **unread),),
    )
    path = engines.path(directory) / "trunk.engine"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, builder.build(source, lambda _done, _steps: None))
    return engines


def open_backend(
    directory: Path,
    shape: Shape,
    engine: str,
    rows: Sequence[int],
    capacities: tuple[int, ...],
    derived: tuple[DerivedTrunk, ...] = (),
) -> Backend:
    """Return the runtime's own backend over a bundle that has only a trunk, and what is derived from it."""
    graph = Graph.model_validate_json((directory / GRAPH).read_text(encoding="utf-8"))
    lookahead = LookaheadInfo.model_construct(length=LOOKAHEAD)
    empty = Graph(file="", inputs=(), outputs=())
    nothing: dict[str, Any] = {"plans": (), "feeds": {}, "logprobs": empty}
    known: dict[str, Any] = {"trunk": graph, "model": shape.model, "lookahead": lookahead, "derived": derived}
    manifest = Manifest.model_construct(rule="match", **known, **nothing)
    if engine not in LIBRARIES:
        return OrtBackend(directory, manifest, engine)
    from pass_exporter.config import EngineConfig
    from pass_exporter.engines.target import choose_targets

    library = LIBRARIES[engine]
    targets = choose_targets(library, EngineConfig(engine), find_device())
    source = engine_source(directory, graph, rows, capacities, library.least_width)
    engines = build_engine(directory, source, library, targets, capacities)
    return TrtBackend(directory, manifest, engines, import_library(library), import_api())


def measure(backend: Backend, rows: Sequence[int], capacity: int, rounds: int) -> list[float]:
    """Return the seconds of a pass for each of `rows`. The cache is full up to the columns of the widest window."""
    backend.resize(capacity, [0])
    plans = [prefill_plan(q) for q in rows]
    for plan in plans:  # all rows of these windows give logits
        backend.stage(0, plan, capacity - max(*rows, 2), 1, [1] * plan.drafts)
    return median_seconds([partial(backend.run_trunk, plan, 1) for plan in plans], rounds)


def median_seconds(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median seconds of each call. The calls take turns, and the first rounds warm up."""

    def timed(call: Callable[[], object]) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    *_, found = in_turns({number: partial(timed, call) for number, call in enumerate(calls)}, WARM_UP + rounds)
    return [statistics.median(seconds[WARM_UP:]) for seconds in found.values()]


def copy_bandwidth(api: Any | None, size: int) -> float:
    """Return the bytes read and written per second by copies of `size` bytes: in GPU memory, or without `api` in host
    memory by one thread."""
    if api is None:
        there, here = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        return 2 * size / median_seconds([lambda: np.copyto(here, there)], COPY_ROUNDS)[0]
    cuda = Cuda(api)
    try:
        source, target = cuda.allocate(size), cuda.allocate(size)

        def copy() -> None:
            for _ in range(COPIES):
                call(api.cudaMemcpyAsync(target, source, size, ON_DEVICE, cuda.stream))
            cuda.synchronize()

        return 2 * size * COPIES / median_seconds([copy], COPY_ROUNDS)[0]
    finally:
        cuda.close()


def shape_options(command: Any) -> Any:
    """Add a flag for every size."""
    for size in reversed(fields(Shape)):
        flag = f"--{size.name.replace('_', '-')}"
        command = click.option(flag, type=click.IntRange(1), default=size.default, show_default=True)(command)
    return command


@click.command()
@click.option("--engine", type=click.Choice(("cpu", "cuda", *LIBRARIES)), required=True)
@click.option("--rows", multiple=True, type=click.IntRange(1), default=(1, 5, 9, 25, 41), show_default=True)
@click.option("--capacity", "capacities", multiple=True, type=int, default=(512, 2048, 8192), show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="Rounds; each runs every width.")
@click.option(
    "--own-caches/--no-own-caches",
    default=True,
    help="Time smaller capacities with a cache of their size, too (TensorRT: one more engine each).  [default: yes]",
)
@click.option("--keep", type=click.Path(path_type=Path), help="Keep trunk and engines here, for the next run.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the results here, as JSON.")
@shape_options
@one_line_errors
def main(engine: str, rounds: int, own_caches: bool, keep: Path | None, output: Path | None, **options: Any) -> None:
    """Print a table of milliseconds, ratio to the narrowest pass, and share of the bandwidth bound."""
    rows, capacities = (tuple(sorted({*options.pop(name)})) for name in ("rows", "capacities"))
    shape = Shape(**options)
    if capacities[0] <= max(*rows, 2):
        raise PassError(f"--capacity {capacities[0]} has no room for a window of {rows[-1]} rows")
    device = None if engine == "cpu" else find_device()
    if engine != "cpu" and device is None:
        raise PassError(f"--engine {engine} needs a GPU: {why_no_device()} (try --engine cpu)")
    bandwidth = copy_bandwidth(device and import_api(), COPIED["gpu" if device else "cpu"])
    report: dict[str, Any] = {"engine": engine, "device": device.name if device else platform.machine()}
    report |= {"shape": asdict(shape), "weight_bytes": shape.weight_bytes, "copy_bandwidth": bandwidth, "cells": []}
    with tempfile.TemporaryDirectory() as scratch:
        directory = write_trunk(keep or Path(scratch), shape)
        with contextlib.closing(open_backend(directory, shape, engine, rows, capacities)) as backend:
            for capacity in capacities:
                seconds = measure(backend, rows, capacity, rounds)
                report["cells"] += cells_of(shape, bandwidth, capacity, rows, seconds)
                write_json(report, output)  # after every capacity, so that an interrupted run keeps its results
        for capacity in capacities[:-1] if own_caches and engine in LIBRARIES else ():
            with contextlib.closing(open_backend(directory, shape, engine, rows, (capacity,))) as backend:
                seconds = measure(backend, rows, capacity, rounds)
            cells = [cell for cell in report["cells"] if cell["capacity"] == capacity]
            for cell, own in zip(cells, seconds, strict=True):
                cell["own_cache_milliseconds"] = 1e3 * own
            write_json(report, output)
    print_table(report)


def cells_of(
    shape: Shape, bandwidth: float, capacity: int, rows: Sequence[int], seconds: Sequence[float]
) -> list[dict[str, float]]:
    """Return the cells of the report for passes of so many `seconds` over `rows`, which rise."""
    bound = (shape.weight_bytes + shape.cache_bytes(capacity)) / bandwidth
    return [
        {"rows": q, "capacity": capacity, "milliseconds": 1e3 * s, "ratio": s / seconds[0], "bound_fraction": bound / s}
        for q, s in zip(rows, seconds, strict=True)
    ]


def print_table(report: dict[str, Any]) -> None:
    title = f"{report['engine']} on {report['device']}, copies at {report['copy_bandwidth'] / 1e9:.0f} GB/s"
    table: dict[int, dict[str, str]] = {cell["rows"]: {"rows": str(cell["rows"])} for cell in report["cells"]}
    for cell in report["cells"]:
        figures = f"{cell['milliseconds']:.2f}  {cell['ratio']:.2f}  {cell['bound_fraction']:.0%}"
        heading = f"S={cell['capacity']}: ms, ratio, of the bound"
        if (own := cell.get("own_cache_milliseconds")) is not None:
            figures, heading = f"{figures}  {own:.2f}", f"{heading}, ms with a cache of this size"
        table[cell["rows"]][heading] = figures
    show_rows(title, table.values(), left=("rows",))


if __name__ == "__main__":
    main()
