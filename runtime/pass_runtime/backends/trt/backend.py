"""The backend for TensorRT: runs trunk and tail of a pass as one captured CUDA graph.

Ids, lengths, logits and the KV cache stay on the device. The graph also copies what a pass emits to
pinned host memory, so the host only launches the graph and waits for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.backends import cuda as cuda_api
from pass_runtime.backends.base import Backend, Capabilities, PassKind, doublings, listed_positions
from pass_runtime.backends.cuda import Cuda
from pass_runtime.backends.trt.engine import EngineCall, Program, TrtEngine, engine_shapes
from pass_runtime.backends.trt.engine_sets import RuntimeCache, Shared, choose_engines
from pass_runtime.backends.trt.library import Library, find_library, import_library
from pass_runtime.bundle.bindings import PREFILL, Binding, Bindings
from pass_runtime.bundle.manifest import EngineSet, Graph, Manifest
from pass_runtime.bundle.open_files import OpenFiles
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.tensors import COLUMNS
from pass_runtime.errors import PassError

Work = tuple[Sequence[tuple[TrtEngine, EngineCall]], Sequence[tuple[npt.NDArray[Any], int]]]
"""What a program runs: engine calls, each with its engine, and then copies to the host, each to a
pinned array from a device address."""
STAGING_BYTES = 4 << 20
"""The staging memory for what the host writes between passes: windows, noise and the like."""
RUNTIME_CACHE_FILE = "kernels.cache"
"""The file of `RuntimeCache`, beside the engines."""


class TrtBackend(Backend):
    """Runs the engines of one set. `close` frees the device's memory."""

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        engines: EngineSet,
        library: Any,
        api: Any,
        *,
        max_batch_size: int | None = 1,
        capacity: int | None = None,
        ordinal: int = 0,
    ) -> None:
        """library: the TensorRT module. api: `cuda.bindings.runtime`. max_batch_size, capacity (the
        largest, in tokens): None is what the engines were built for. ordinal: the GPU's number."""
        capabilities = _capabilities(manifest, engines, max_batch_size, capacity)
        self._cuda = Cuda(api, STAGING_BYTES, ordinal)
        directory = engines.path(bundle)
        files = OpenFiles(directory, (engine.file for engine in engines.engines))
        super().__init__(bundle, manifest, capabilities, self._cuda, files)
        self._engine_set = engines
        kernels = None
        if find_library(engines.library).compiles_kernels:
            kernels = RuntimeCache(library, directory / RUNTIME_CACHE_FILE)
        self._shared = Shared(library, self._cuda, kernels)
        self._engines: dict[str, TrtEngine] = {}  # by graph file
        self._programs: dict[tuple[Any, ...], Program] = {}  # by what they run, see `_program`
        self._results: dict[tuple[str, tuple[int, ...]], npt.NDArray[np.int64]] = {}
        # The present KV capacity, and the number of columns that holds it: the cache entries that a
        # pass reads, one of the capacities that the engines were built for.
        self._capacity, self._columns = 0, 0
        self._finalizer = weakref.finalize(
            self, _release, self._programs, self._engines, self._shared
        )
        try:
            with self.for_this_thread():
                self._engine(manifest.trunk)  # If it cannot be loaded, opening fails.
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        bundle: Path,
        manifest: Manifest,
        library: Library,
        *,
        max_batch_size: int | None = 1,
        capacity: int | None = None,
        verify: bool = True,
        api: Any = None,
        ordinal: int = 0,
    ) -> TrtBackend:
        """Open the engine set of `library` that runs on GPU `ordinal`, or raise PassError."""
        module = import_library(library)
        api = api or cuda_api.import_api()
        if ordinal:
            cuda_api.require_device(api, ordinal)
        device = cuda_api.find_device(api, ordinal)
        why_absent = "" if device else cuda_api.why_no_device(api)
        engines = choose_engines(
            bundle, manifest, library, module.__version__, device, verify, why_absent=why_absent
        )
        return cls(
            bundle,
            manifest,
            engines,
            module,
            api,
            max_batch_size=max_batch_size,
            capacity=capacity,
            ordinal=ordinal,
        )

    def save_kernels(self) -> None:
        self._shared.save_kernels()

    def close(self) -> None:
        self._finalizer()

    @property
    def capacity(self) -> int:
        return self._capacity

    def resize(self, capacity: int, lengths: Sequence[int]) -> None:
        """Change how many cache entries passes read. All of the cache is allocated at first."""
        if not self.cache.capacity:
            self.cache.resize(self._engine_set.capacities[-1], lengths)
        self._capacity = capacity
        self._columns = next(c for c in self._engine_set.capacities if c >= capacity)

    def run_trunk(self, plan: Plan, batch: int) -> None:
        self._program(
            "trunk", (plan.name, batch), lambda: ([self._bind_trunk(plan, batch)], ())
        ).run()

    def run_tail(self, kind: PassKind) -> None:
        self._program("tail", _pass_key(kind), lambda: (self._bind_tails(kind), ())).run()

    def _run_pass(self, kind: PassKind) -> Mapping[str, npt.NDArray[np.int64]]:
        results = {
            name: self._result(name, shape) for name, shape in self.result_shapes(kind).items()
        }

        def make_work() -> Work:
            tails = self._bind_tails(kind)
            addresses = {
                name: address for _, call in tails for name, address in call.addresses.items()
            }
            copies = [(array, addresses[name]) for name, array in results.items()]
            return [self._bind_trunk(kind.plan, kind.batch), *tails], copies

        self._program("pass", _pass_key(kind), make_work).run()
        return results

    def _run_prefill(self, slot: int, plan: Plan, *, scored: bool) -> None:
        key = (plan.width, slot, *(["with logprobs"] if scored else []))

        def make_work() -> Work:
            calls = [self._bind_trunk(plan, 1, slot, prefill=True, scored=scored)]
            if scored:
                bindings = self.bindings.logprobs(plan, 1, scope=PREFILL)
                kind = PassKind(plan, 1, "greedy")
                calls.append(self._bind_tail(kind, self.manifest.logprobs, bindings))
            return calls, ()

        self._program("prefill", key, make_work).run()

    def _program(self, what: str, key: tuple[Any, ...], make_work: Callable[[], Work]) -> Program:
        """Return the program that runs `what` ("pass", "trunk", "tail" or "prefill") with `key`.
        Every key and number of columns has its own, as captured graphs contain addresses."""
        key = (what, self._columns, *key)
        if key not in self._programs:
            name = " ".join(map(str, (what, *key[2:], f"over {self._columns} columns")))
            self._programs[key] = Program(name, self._cuda, *make_work(), captures=self.captures)
        return self._programs[key]

    def _bind_trunk(
        self,
        plan: Plan,
        batch: int,
        slot: int = 0,
        *,
        prefill: bool = False,
        scored: bool = False,
    ) -> tuple[TrtEngine, EngineCall]:
        """Return the trunk's engine and its call, for `batch` slots from `slot` on."""
        bindings = self.bindings.trunk(plan, batch, prefill=prefill, scored=scored)
        engine = self._engine(self.manifest.trunk)
        shapes, addresses = self._shapes_and_addresses(bindings)
        # Of this input only the length matters.
        columns = Binding(
            COLUMNS, f"{COLUMNS}.{self._columns}", (self._columns,), "bool", by_slot=False
        )
        shapes[COLUMNS], addresses[COLUMNS] = columns.shape, self.buffers.address_of(columns)
        for name, address in self.cache.addresses(slot):
            shapes[name], addresses[name] = self.cache.shape(batch), address
        for output, source in engine.aliases.items():
            addresses[output] = addresses[source]
        sizes = {
            "batch": batch,
            "width": shapes["input_ids"][1],
            "logit_rows": shapes["logit_rows"][0],
        }
        sizes |= {"lookahead_rows": shapes.get("lookahead_rows", (0,))[0], COLUMNS: self._columns}
        return engine, EngineCall(engine.profile(sizes), shapes, addresses)

    def _bind_tails(self, kind: PassKind) -> list[tuple[TrtEngine, EngineCall]]:
        """Return the calls after the trunk's, with their engines: processors, tail, logprobs."""
        plan, batch = kind.plan, kind.batch
        tail = self.bindings.tail(plan, kind.sampler, batch, processed=bool(kind.touched))
        graphs = [(self.bindings.tail_graph(plan, kind.sampler), tail)]
        if kind.touched:
            processors = self.bindings.processors(self.processors, plan, batch, kind.touched)
            graphs.insert(0, (self.processors, processors))
        if kind.logprobs:
            bindings = self.bindings.logprobs(plan, batch, processed=kind.logprobs_key[-1])
            graphs.append((self.manifest.logprobs, bindings))
        return [self._bind_tail(kind, *graph) for graph in graphs]

    def _bind_tail(
        self, kind: PassKind, graph: Graph, bindings: Bindings
    ) -> tuple[TrtEngine, EngineCall]:
        engine, plan, batch = self._engine(graph), kind.plan, kind.batch
        sizes = {"batch": batch, "width": plan.width, "lookahead_rows": len(plan.lookahead_rows)}
        sizes |= {"positions": self.capabilities.noise_positions, "max_emitted": plan.max_emitted}
        sizes |= {"processed_rows": plan.drafts + 1, "touched": kind.touched}
        return engine, EngineCall(engine.profile(sizes), *self._shapes_and_addresses(bindings))

    def _shapes_and_addresses(
        self, bindings: Bindings
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
        """Return the shape of every input, and the address of every input and output."""
        all_bindings = (*bindings.inputs, *bindings.outputs)
        addresses = {b.tensor: self.buffers.address_of(b) for b in all_bindings}
        return {b.tensor: b.shape for b in bindings.inputs}, addresses

    def _result(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """Return the pinned host array for an output, the same in every pass."""
        if (name, shape) not in self._results:
            self._results[name, shape] = self._cuda.pinned(shape, np.int64)
        return self._results[name, shape]

    def _engine(self, graph: Graph) -> TrtEngine:
        """Return the engine of `graph`, which is loaded at the first call."""
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
    """Return what the engines can do within the options. Raises PassError if these exceed it."""
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
        manifest.tree_sizes({engine.graph for engine in engines.engines}),
        least_width=least_width(engines),
        kernels=engines.library,
        engine_positions=listed_positions(built),
        keeps_graphs=True,
        # the windows of passes that verify drafts and of plain ones, which give all rows logits
        scored_widths=(engines.lookahead + 1, 1),
    )


def least_width(engines: EngineSet) -> int:
    """Return the rows of the narrowest window that the trunk's engine was built for."""
    # Only the trunk's profiles have columns.
    profiles = [profile.sizes for engine in engines.engines for profile in engine.profiles]
    return min(sizes["width"][0] for sizes in profiles if COLUMNS in sizes)


def _pass_key(kind: PassKind) -> tuple[Any, ...]:
    """Return the key of a pass or its tails for `_program`, which joins the items to a name."""
    extras = []
    if kind.logprobs:
        extras.append("with processed logprobs" if kind.logprobs_key[-1] else "with logprobs")
    if kind.touched:
        extras.append(f"with processors of {kind.touched} tokens")
    return kind.plan.name, kind.batch, kind.sampler, *extras


def _release(programs: dict[Any, Program], engines: dict[str, TrtEngine], shared: Shared) -> None:
    """Free the programs, then the engines that they run, then graphs, memory and the stream of
    `shared.cuda`. In a fork, where CUDA does not work, free nothing."""
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
