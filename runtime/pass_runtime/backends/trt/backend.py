"""TensorRT: trunk and tail of a pass are one captured CUDA graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pass_runtime.backends import cuda as cuda_api
from pass_runtime.backends.base import Backend, Batch, Capabilities, doublings, listed_positions
from pass_runtime.backends.cuda import Cuda
from pass_runtime.backends.open import split_device
from pass_runtime.backends.trt.engine import EngineCall, Program, TrtEngine, engine_shapes
from pass_runtime.backends.trt.engine_sets import RuntimeCache, Shared, choose_engines
from pass_runtime.backends.trt.library import LIBRARIES, import_library
from pass_runtime.bundle.bindings import PREFILL, Binding, Bindings
from pass_runtime.bundle.manifest import EngineSet, Graph, Manifest
from pass_runtime.bundle.open_files import OpenFiles
from pass_runtime.bundle.tensors import COLUMNS
from pass_runtime.bundle.window import Window
from pass_runtime.errors import PassError

if TYPE_CHECKING:
    from pass_runtime.options import LoadOptions

Work = tuple[Sequence[tuple[TrtEngine, EngineCall]], Sequence[tuple[npt.NDArray[Any], int]]]
"""Engine calls, and then copies to pinned host arrays from device addresses."""
STAGING_BYTES = 4 << 20
"""For windows, noise and what else the host writes between passes."""
RUNTIME_CACHE_FILE = "kernels.cache"


class TrtBackend(Backend):
    def __init__(
        self, bundle: Path, manifest: Manifest, options: LoadOptions, api: Any = None
    ) -> None:
        """Open the engine set that runs on this machine, or raise PassError. api:
        `cuda.bindings.runtime`."""
        kind, ordinal = split_device(options.device)
        library = LIBRARIES[kind]
        module = import_library(library)
        api = api or cuda_api.import_api()
        if ordinal:
            cuda_api.require_device(api, ordinal)
        device = cuda_api.find_device(api, ordinal)
        engines = choose_engines(
            bundle,
            manifest,
            library,
            module.__version__,
            device,
            options.verify,
            why_absent="" if device else cuda_api.why_no_device(api),
        )
        capabilities = _capabilities(manifest, engines, options.max_batch_size, options.capacity)
        self._cuda = Cuda(api, STAGING_BYTES, ordinal)
        directory = engines.path(bundle)
        files = OpenFiles(directory, (engine.file for engine in engines.engines))
        super().__init__(bundle, manifest, capabilities, self._cuda, files)
        self._engine_set = engines
        kernels = None
        if library.compiles_kernels:
            kernels = RuntimeCache(module, directory / RUNTIME_CACHE_FILE)
        self._shared = Shared(module, self._cuda, kernels)
        self._engines: dict[str, TrtEngine] = {}  # by graph file
        self._programs: dict[tuple[Any, ...], Program] = {}  # by what they run, see `_program`
        self._results: dict[tuple[str, tuple[int, ...]], npt.NDArray[np.int64]] = {}
        # The cache entries that a pass reads: the least sufficient built capacity.
        self._columns = 0
        self._finalizer = weakref.finalize(
            self, _release, self._programs, self._engines, self._shared
        )
        try:
            with self.for_this_thread():
                self._engine(manifest.trunk)  # fail at once if it cannot be loaded
        except BaseException:
            self.close()
            raise

    def save_kernels(self) -> None:
        self._shared.save_kernels()

    def close(self) -> None:
        self._finalizer()

    def resize(self, capacity: int, lengths: Sequence[int]) -> None:
        if not self.cache.capacity:
            self.cache.resize(self._engine_set.capacities[-1], lengths)
        self.capacity = capacity
        self._columns = next(c for c in self._engine_set.capacities if c >= capacity)

    def run_trunk(self, window: Window, batch: int) -> None:
        self._program(
            "trunk", (window.name, batch), lambda: ([self._bind_trunk(window, batch)], ())
        ).run()

    def run_tail(self, batch: Batch) -> None:
        self._program("tail", _pass_key(batch), lambda: (self._bind_tails(batch), ())).run()

    def _run_pass(self, batch: Batch) -> Mapping[str, npt.NDArray[np.int64]]:
        results = {
            name: self._result(name, shape) for name, shape in self.result_shapes(batch).items()
        }

        def make_work() -> Work:
            tails = self._bind_tails(batch)
            addresses = {
                name: address for _, call in tails for name, address in call.addresses.items()
            }
            copies = [(array, addresses[name]) for name, array in results.items()]
            return [self._bind_trunk(batch.window, batch.size), *tails], copies

        self._program("pass", _pass_key(batch), make_work).run()
        return results

    def _run_prefill(self, slot: int, window: Window, *, scored: bool) -> None:
        key = (window.width, slot, *(["with logprobs"] if scored else []))

        def make_work() -> Work:
            calls = [self._bind_trunk(window, 1, slot, prefill=True, scored=scored)]
            if scored:
                graph = self.manifest.logprobs
                bindings = self.bindings.after_trunk(graph, window, 1, scope=PREFILL)
                calls.append(self._bind(graph, bindings))
            return calls, ()

        self._program("prefill", key, make_work).run()

    def _program(self, what: str, key: tuple[Any, ...], make_work: Callable[[], Work]) -> Program:
        key = (what, self._columns, *key)
        if key not in self._programs:
            name = " ".join(map(str, (what, *key[2:], f"over {self._columns} columns")))
            self._programs[key] = Program(name, self._cuda, *make_work(), captures=self.captures)
        return self._programs[key]

    def _bind_trunk(
        self,
        window: Window,
        batch: int,
        slot: int = 0,
        *,
        prefill: bool = False,
        scored: bool = False,
    ) -> tuple[TrtEngine, EngineCall]:
        bindings = self.bindings.trunk(window, batch, prefill=prefill, scored=scored)
        # Only the length matters.
        columns = Binding(
            COLUMNS, f"{COLUMNS}.{self._columns}", (self._columns,), "bool", by_slot=False
        )
        inputs, sizes = [*bindings.inputs, columns], {**bindings.sizes, COLUMNS: self._columns}
        return self._bind(self.manifest.trunk, Bindings(inputs, bindings.outputs, sizes), slot)

    def _bind_tails(self, batch: Batch) -> list[tuple[TrtEngine, EngineCall]]:
        calls = []
        for graph, touched, processed in self.graphs_after_trunk(batch):
            bindings = self.bindings.after_trunk(
                graph, batch.window, batch.size, touched=touched, processed=processed
            )
            calls.append(self._bind(graph, bindings))
        return calls

    def _bind(
        self, graph: Graph, bindings: Bindings, cache_slot: int | None = None
    ) -> tuple[TrtEngine, EngineCall]:
        engine, all_bindings = self._engine(graph), (*bindings.inputs, *bindings.outputs)
        shapes = {each.tensor: each.shape for each in bindings.inputs}
        addresses = {each.tensor: self.buffers.address_of(each) for each in all_bindings}
        if cache_slot is not None:
            for name, address in self.cache.addresses(cache_slot):
                shapes[name], addresses[name] = self.cache.shape(bindings.sizes["batch"]), address
        for output, source in engine.aliases.items():
            addresses[output] = addresses[source]
        return engine, EngineCall(engine.profile(bindings.sizes), shapes, addresses)

    def _result(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        if (name, shape) not in self._results:
            self._results[name, shape] = self._cuda.pinned(shape, np.int64)
        return self._results[name, shape]

    def _engine(self, graph: Graph) -> TrtEngine:
        if graph.file not in self._engines:
            file = next(
                (engine for engine in self._engine_set.engines if engine.graph == graph.file), None
            )
            if file is None:
                raise PassError(
                    f"{self._engine_set.directory} has no engine of {graph.file}; build the "
                    "engines again"
                )
            capacity = self._engine_set.capacities[-1]
            shapes = engine_shapes(
                graph, capacity, self.capabilities.least_width, trunk=graph == self.manifest.trunk
            )
            self._engines[graph.file] = TrtEngine(self._shared, self.files, file, shapes)
        return self._engines[graph.file]


def _capabilities(
    manifest: Manifest, engines: EngineSet, max_batch_size: int | None, capacity: int | None
) -> Capabilities:
    """Raises PassError if the options exceed the engines."""
    max_batch_size = max_batch_size or engines.max_batch_size
    if max_batch_size > engines.max_batch_size:
        raise PassError(
            f"the engines were built with --max-batch-size {engines.max_batch_size}; use that, or "
            f"build them with --max-batch-size {max_batch_size}"
        )
    built = engines.capacities[-1]
    max_capacity = built if capacity is None else capacity
    if max_capacity > built:
        raise PassError(
            f"the engines' KV capacity is {built} tokens; use --capacity {built} or less, or build "
            f"them with --max-seq-len {max_capacity}"
        )
    return Capabilities(
        f"{engines.library} {engines.version}",
        manifest.model.vocab_size,
        (*(size for size in engines.capacities if size < max_capacity), max_capacity),
        (*engines.prefill_widths, 1),
        doublings(max_batch_size),
        engines.lookahead,
        least_width=least_width(engines),
        kernels=engines.library,
        engine_positions=listed_positions(built),
        keeps_graphs=True,
        # windows that give all rows logits
        scored_widths=(engines.lookahead + 1, 1),
        verifying=tuple(w for w in manifest.verifying if w.drafts >= engines.lookahead),
    )


def least_width(engines: EngineSet) -> int:
    """Of the trunk's engine, in rows."""
    # Only the trunk's profiles have columns.
    profiles = [profile.sizes for engine in engines.engines for profile in engine.profiles]
    return min(sizes["width"][0] for sizes in profiles if COLUMNS in sizes)


def _pass_key(batch: Batch) -> tuple[Any, ...]:
    extras = []
    if batch.logprobs:
        extras.append("with processed logprobs" if batch.reads_processed else "with logprobs")
    if batch.touched:
        extras.append(f"with processors of {batch.touched} tokens")
    return batch.window.name, batch.size, batch.sampler, *extras


def _release(programs: dict[Any, Program], engines: dict[str, TrtEngine], shared: Shared) -> None:
    if shared.cuda.forked:
        return
    with shared.cuda.for_this_thread():
        if shared.cuda.failure is None:
            shared.save_kernels()
        programs.clear()
        for engine in engines.values():
            engine.close()
        engines.clear()
        if shared.compiled_kernels is not None:
            shared.compiled_kernels.close()
    shared.cuda.close()
