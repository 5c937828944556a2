"""TensorRT backend: trunk and tail of a plan as one captured CUDA graph, replayed pass after pass.

Ids, lengths, logits and the KV cache never leave the device. The graph copies what a pass emits to
pinned host memory, so the host only launches it and waits.
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
from pass_runtime.bundle.bindings import Binding, Bindings
from pass_runtime.bundle.manifest import EngineSet, Graph, Manifest
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.tensors import COLUMNS
from pass_runtime.errors import PassError

Work = tuple[Sequence[tuple[TrtEngine, EngineCall]], Sequence[tuple[npt.NDArray[Any], int]]]
"""What a program runs: engine calls, then copies to pinned arrays from device addresses."""
STAGING_BYTES = 4 << 20
"""The pinned memory for what the host writes between passes: windows, noise and the like."""
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
        """library: the TensorRT module. api: `cuda.bindings.runtime`. capacity: the largest KV
        capacity, in tokens. ordinal: the GPU's number."""
        capabilities = _capabilities(manifest, engines, max_batch_size, capacity)
        self._cuda = Cuda(api, STAGING_BYTES, ordinal)
        super().__init__(bundle, manifest, capabilities, self._cuda)
        self._engine_set = engines
        compiled = engines.path(bundle) / RUNTIME_CACHE_FILE
        compiles = find_library(engines.library).compiles_kernels
        kernels = RuntimeCache(library, compiled) if compiles else None
        self._shared = Shared(library, self._cuda, kernels)
        self._engines: dict[str, TrtEngine] = {}  # by graph file
        self._programs: dict[tuple[Any, ...], Program] = {}
        self._results: dict[tuple[str, tuple[int, ...]], npt.NDArray[np.int64]] = {}
        self._capacity = self._columns = 0  # the engines' smallest capacity that holds _capacity
        self._finalizer = weakref.finalize(
            self, _release, self._programs, self._engines, self._shared
        )
        try:
            with self.for_this_thread():
                self._engine(manifest.trunk)  # An engine that cannot be loaded is refused now.
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
        """Open the engine set of `library` that fits GPU `ordinal`, or raise PassError."""
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
        """Change how many entries a pass reads. The cache is always allocated for the engines'
        largest capacity."""
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

        def make() -> Work:
            tails = self._bind_tails(kind)
            addresses = {
                name: address for _, call in tails for name, address in call.addresses.items()
            }
            copies = [(array, addresses[name]) for name, array in results.items()]
            return [self._bind_trunk(kind.plan, kind.batch), *tails], copies

        self._program("pass", _pass_key(kind), make).run()
        return results

    def _run_prefill(self, slot: int, plan: Plan) -> None:
        self._program(
            "prefill",
            (plan.width, slot),
            lambda: ([self._bind_trunk(plan, 1, slot, prefill=True)], ()),
        ).run()

    def _program(self, what: str, key: tuple[Any, ...], make_work: Callable[[], Work]) -> Program:
        """The program that runs `what` ("pass", "trunk", "tail" or "prefill") with `key`. Every key
        and every number of cache entries has its own program, because a captured graph contains
        addresses and shapes."""
        key = (what, self._columns, *key)
        if key not in self._programs:
            name = " ".join(map(str, (what, *key[2:], f"over {self._columns} columns")))
            self._programs[key] = Program(name, self._cuda, *make_work(), captures=self.captures)
        return self._programs[key]

    def _bind_trunk(
        self, plan: Plan, batch: int, slot: int = 0, *, prefill: bool = False
    ) -> tuple[TrtEngine, EngineCall]:
        bindings = self.bindings.trunk(plan, batch, prefill=prefill)
        engine = self._engine(self.manifest.trunk)
        shapes, addresses = self._shapes_and_addresses(bindings)
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
        """The shape of every input, and the address of every tensor."""
        every = (*bindings.inputs, *bindings.outputs)
        addresses = {b.tensor: self.buffers.address_of(b) for b in every}
        return {b.tensor: b.shape for b in bindings.inputs}, addresses

    def _result(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """Pinned host memory for an output, the same in every pass."""
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
            path = self._engine_set.path(self.bundle) / file.file
            capacity = self._engine_set.capacities[-1]
            shapes = engine_shapes(
                graph, capacity, self.capabilities.least_width, trunk=graph == self.manifest.trunk
            )
            self._engines[graph.file] = TrtEngine(self._shared, path, file, shapes)
        return self._engines[graph.file]


def _capabilities(
    manifest: Manifest, engines: EngineSet, max_batch_size: int | None, capacity: int | None
) -> Capabilities:
    """What the engines can do, limited by the options. Raises PassError if these exceed it."""
    max_batch_size = max_batch_size or engines.max_batch_size
    if max_batch_size > engines.max_batch_size:
        raise PassError(
            f"the engines were built with --max-batch-size {engines.max_batch_size}; use that, or "
            f"build them with --max-batch-size {max_batch_size}"
        )
    built = engines.capacities[-1]
    largest = built if capacity is None else capacity
    if largest > built:
        raise PassError(
            f"the engines' KV capacity is {built} tokens; use --capacity {built} or less, or build "
            f"them with --max-seq-len {largest}"
        )
    return Capabilities(
        f"{engines.library} {engines.version}",
        manifest.model.vocab_size,
        (*(columns for columns in engines.capacities if columns < largest), largest),
        (*engines.prefill_widths, 1),
        doublings(max_batch_size),
        engines.lookahead,
        manifest.tree_sizes({engine.graph for engine in engines.engines}),
        rounds_activations=manifest.model.weights == "w8a8",
        least_width=least_width(engines),
        engine_positions=listed_positions(built),
        keeps_graphs=True,
    )


def least_width(engines: EngineSet) -> int:
    """Rows of the narrowest window that the trunk's engine has a profile for."""
    profiles = [profile.sizes for engine in engines.engines for profile in engine.profiles]
    return min(sizes["width"][0] for sizes in profiles if COLUMNS in sizes)


def _pass_key(kind: PassKind) -> tuple[Any, ...]:
    """Identifies a pass or its tails. `_program` joins the items to a name for the program."""
    extras = []
    if kind.logprobs:
        extras.append("with processed logprobs" if kind.logprobs_key[-1] else "with logprobs")
    if kind.touched:
        extras.append(f"with processors of {kind.touched} tokens")
    return kind.plan.name, kind.batch, kind.sampler, *extras


def _release(programs: dict[Any, Program], engines: dict[str, TrtEngine], shared: Shared) -> None:
    """Drop the programs, then free the engines that they run, then what `shared.cuda` holds:
    graphs, memory and stream. In a forked process CUDA does not work, so free nothing."""
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
