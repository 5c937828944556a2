"""TensorRT backend: trunk and tail of a plan as one captured CUDA graph, replayed pass after pass.

Ids, lengths, logits and the KV cache never leave the device. What a pass emits is copied to pinned memory inside the
graph, so that the host's part of a pass is a launch and a wait.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.backends.base import Capabilities
from pass_runtime.backends.graph_backend import GraphBackend
from pass_runtime.backends.trt import cuda as cuda_api
from pass_runtime.backends.trt.cuda import Cuda, DeviceBuffers
from pass_runtime.backends.trt.engine import Binding, TrtEngine
from pass_runtime.backends.trt.engine_sets import choose_engines
from pass_runtime.backends.trt.library import Flavour, import_library, make_logger
from pass_runtime.bundle.bindings import CACHE, COLUMNS, Slot, tail_graph, tail_slots, trunk_slots
from pass_runtime.bundle.manifest import EngineSet, Manifest
from pass_runtime.bundle.plan import Plan, prefill_plan

Work = Sequence[tuple[TrtEngine, Binding]]


class Program:
    """Work on the stream that is repeated: run once as it is, then captured, then replayed."""

    def __init__(self, cuda: Cuda, work: Work, copies: Sequence[tuple[npt.NDArray[Any], int]] = ()) -> None:
        """copies: pinned arrays with the device addresses that they are filled from in the end."""
        self._cuda, self._work, self._copies = cuda, work, copies
        self._runs = 0
        self._graph: Any = None

    def run(self) -> None:
        """Returns when the device has done it."""
        self._runs += 1
        if self._graph is None and self._runs > 1 and all(engine.capturable(bound) for engine, bound in self._work):
            self._graph = self._cuda.capture(self._enqueue)
        if self._graph is None:
            self._enqueue()
        else:
            self._cuda.launch(self._graph)
        self._cuda.synchronize()

    def _enqueue(self) -> None:
        for engine, binding in self._work:
            engine.enqueue(binding)
        for array, address in self._copies:
            self._cuda.download(array, address)


class TrtBackend(GraphBackend):
    """The engines of one set; `close` gives the device's memory back."""

    def __init__(self, bundle: Path, manifest: Manifest, engines: EngineSet, library: Any, api: Any) -> None:
        device = f"{engines.flavour} {engines.version}"
        capabilities = Capabilities(
            device,
            manifest.model.vocab_size,
            engines.capacities,
            (*engines.prefill_widths, 1),
            engines.lookahead,
            _least_width(engines),
        )
        self._cuda = Cuda(api)
        self._buffers = DeviceBuffers(self._cuda)
        super().__init__(bundle, manifest, capabilities, self._buffers)
        self._set, self._library = engines, library
        self._logger = make_logger(library, [])
        self._runtime = library.Runtime(self._logger)
        self._engines: dict[str, TrtEngine] = {}  # by graph file
        self._cache: dict[str, tuple[Slot, int]] = {}  # by input
        self._programs: dict[tuple[Any, ...], Program] = {}
        self._results: dict[tuple[str, int], npt.NDArray[np.int64]] = {}
        self._finalizer = weakref.finalize(self, _release, self._programs, self._engines, self._cuda)
        self._engine(manifest.trunk.file)  # what cannot be loaded is refused now

    @classmethod
    def open(
        cls, bundle: Path, manifest: Manifest, flavour: Flavour, *, verify: bool = True, api: Any = None
    ) -> TrtBackend:
        """The engine set of `flavour` that fits this machine; PassError where none does."""
        library = import_library(flavour)
        api = api or cuda_api.import_api()
        engines = choose_engines(bundle, manifest, flavour, library.__version__, cuda_api.find_device(api), verify)
        return cls(bundle, manifest, engines, library, api)

    def close(self) -> None:
        self._finalizer()

    def _grow(self, _capacity: int) -> None:
        """The cache is as long as it will ever be: only the columns that a pass reads grow."""
        if not self._cache:
            model, longest = self._manifest.model, self._set.capacities[-1]
            shape = (1, model.kv_heads, longest, model.head_dim)
            tensors = [tensor for tensor in self._manifest.trunk.inputs if tensor.name.startswith(CACHE)]
            slots = [Slot(tensor.name, tensor.name, shape, tensor.dtype) for tensor in tensors]
            self._cache = {slot.tensor: (slot, at) for slot, at in self._placed(slots)}

    def _run_prefill(self, plan: Plan, logit_rows: npt.NDArray[np.int64]) -> None:
        width = max(plan.width, self.capabilities.least_width)
        self._buffers.put(f"{prefill_plan(width).name}.logit_rows", logit_rows)
        self._program("prefill", plan, lambda: Program(self._cuda, [self._bind_trunk(plan, logit_rows)])).run()

    def _step(self, plan: Plan) -> list[int]:
        count, emitted = self._result("count", 1), self._result("emitted", plan.max_emitted)

        def make() -> Program:
            engine, tail = self._bind_tail(plan)
            copies = [(count, tail.addresses["count"]), (emitted, tail.addresses["emitted"])]
            return Program(self._cuda, [self._bind_trunk(plan), (engine, tail)], copies)

        self._program("step", plan, make).run()
        tokens: list[int] = emitted[: int(count[0])].tolist()
        return tokens

    def _time(self, plan: Plan) -> tuple[float, float]:
        started = time.perf_counter()
        self._program("trunk", plan, lambda: Program(self._cuda, [self._bind_trunk(plan)])).run()
        between = time.perf_counter()
        self._program("tail", plan, lambda: Program(self._cuda, [self._bind_tail(plan)])).run()
        return between - started, time.perf_counter() - between

    def logits(self, plan: Plan) -> npt.NDArray[np.float32]:
        logits: npt.NDArray[np.float32] = np.empty((1, plan.width, self.capabilities.vocab_size), np.float32)
        self._cuda.download(logits, self._buffers.get("logits", logits.shape, np.float32))
        self._cuda.synchronize()
        return logits.reshape(logits.shape[1:])

    def _program(self, kind: str, plan: Plan, make: Callable[[], Program]) -> Program:
        """Addresses and shapes are part of a captured graph: there is one for every plan, sampler and capacity."""
        key = (kind, plan.name, self.capacity, self._params.sampler)
        if key not in self._programs:
            self._programs[key] = make()
        return self._programs[key]

    def _bind_trunk(self, plan: Plan, logit_rows: npt.NDArray[np.int64] | None = None) -> tuple[TrtEngine, Binding]:
        ids = self._buffers.get("input_ids", (1, plan.width), np.int64)
        rows = plan.logit_rows if logit_rows is None else logit_rows
        if plan.width < self.capabilities.least_width:  # behind its ids lie zeros: padding
            plan = prefill_plan(self.capabilities.least_width)
        slots = trunk_slots(self._manifest, plan, rows)
        columns = Slot(COLUMNS, f"{COLUMNS}.{self.capacity}", (self.capacity,), "bool")
        engine = self._engine(self._manifest.trunk.file)
        window = [slot for slot in slots.inputs if slot.tensor == "input_ids"]
        others = [slot for slot in (*slots.inputs, columns) if slot.tensor != "input_ids"]
        inputs = [*((slot, ids) for slot in window), *self._placed(others), *self._cache.values()]
        outputs = self._placed(slots.outputs)
        for output, source in engine.aliases.items():
            slot, at = self._cache[source]
            outputs.append((replace(slot, tensor=output), at))
        sizes = {"batch": 1, "width": plan.width, "logit_rows": len(rows), COLUMNS: self.capacity}
        adapted = any(slot.tensor == "lookahead_rows" for slot in slots.inputs)
        sizes["lookahead_rows"] = len(plan.lookahead_rows) if adapted else 0
        return engine, engine.bind(engine.profile(sizes), inputs, outputs)

    def _bind_tail(self, plan: Plan) -> tuple[TrtEngine, Binding]:
        sampler = self._params.sampler
        slots = tail_slots(self._manifest, plan, sampler, self.capabilities.positions)
        engine = self._engine(tail_graph(self._manifest, plan, sampler).file)
        sizes = {"batch": 1, "width": plan.width, "lookahead_rows": len(plan.lookahead_rows)}
        profile = engine.profile(sizes | {"positions": self.capabilities.positions})
        return engine, engine.bind(profile, self._placed(slots.inputs), self._placed(slots.outputs))

    def _placed(self, slots: Sequence[Slot]) -> list[tuple[Slot, int]]:
        return [(slot, self._buffers.at(slot)) for slot in slots]

    def _result(self, name: str, size: int) -> npt.NDArray[np.int64]:
        """Pinned host memory [size], the same every time."""
        if (name, size) not in self._results:
            self._results[name, size] = self._cuda.pinned((size,), np.int64)
        return self._results[name, size]

    def _engine(self, graph: str) -> TrtEngine:
        if graph not in self._engines:
            file = next(engine for engine in self._set.engines if engine.graph == graph)
            path = self._set.path(self._bundle) / file.file
            self._engines[graph] = TrtEngine(self._library, self._runtime, self._cuda, path, file)
        return self._engines[graph]


def _least_width(engines: EngineSet) -> int:
    """Rows of the narrowest window that the trunk's engine has a profile for."""
    profiles = [profile.sizes for engine in engines.engines for profile in engine.profiles]
    return min(sizes["width"][0] for sizes in profiles if COLUMNS in sizes)


def _release(programs: dict[Any, Program], engines: dict[str, TrtEngine], cuda: Cuda) -> None:
    """Graphs refer to engines' kernels, engines to the stream: that order."""
    programs.clear()
    for engine in engines.values():
        engine.close()
    engines.clear()
    cuda.close()
