"""ONNX Runtime backend: trunk and tails bound to buffers that stay on the device.

A pass is two `run_with_iobinding` calls and the copy of a few integers to the host. One session serves every window
width and batch; what is bound is kept by plan and batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from pass_runtime.backends.base import Backend, PassKind
from pass_runtime.backends.capabilities import DEFAULT_BATCH, Capabilities, batch_sizes
from pass_runtime.backends.memory import Memory
from pass_runtime.backends.ort.engine import (
    Bound,
    BoundTensor,
    bind,
    check_graph,
    choose_device,
    map_shared,
    open_memory,
    open_session,
)
from pass_runtime.bundle.bindings import CACHE, PRESENT, Binding
from pass_runtime.bundle.manifest import Graph, Manifest
from pass_runtime.bundle.plan import Plan
from pass_runtime.errors import PassError

FIRST_CAPACITY = 256
COLUMNS = 64
"""On the CPU a capacity is a multiple of this: sums over the columns then round alike, however many are masked."""
PREFILL_WIDTHS = (256, 64, 16, 1)

Key = TypeVar("Key")


class OrtBackend(Backend):
    """The bundle's own trunk and tails on the CPU or on CUDA."""

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        device: str = "cpu",
        *,
        threads: int = 0,
        max_batch_size: int | None = 1,
        capacity: int | None = None,
        memory: Memory | None = None,
        exact: bool = False,
    ) -> None:
        """device: cpu, cuda or auto. threads: 0 lets ONNX Runtime choose. capacity: the most cache columns.

        exact: how the trunk is run, see `open_session`.
        """
        device = choose_device(device)
        if manifest.model.dtype == "bfloat16":
            raise PassError("bf16 bundles run on TensorRT engines; for ONNX Runtime export with --dtype fp16 or fp32")
        capabilities = Capabilities(
            device,
            manifest.model.vocab_size,
            CAPACITIES[device](capacity or manifest.model.max_capacity),
            PREFILL_WIDTHS,
            batch_sizes(max_batch_size or DEFAULT_BATCH),
        )
        super().__init__(bundle, manifest, capabilities, memory or open_memory(device))
        self._finalizer = weakref.finalize(self, self.memory.close)
        self._trunk = self._open_trunk(threads, exact)
        self._tails: dict[str, ort.InferenceSession] = {}  # by file
        self._bound_trunks: dict[tuple[str, int], Bound] = {}  # by plan and batch, for the present cache
        self._bound_prefills: dict[tuple[int, int], Bound] = {}  # by width and slot, for the present cache
        self._bound_tails: dict[tuple[str, str, int], Bound] = {}  # by plan, sampler or "logprobs", and batch

    def _open_trunk(self, threads: int, exact: bool) -> ort.InferenceSession:
        device = self.capabilities.device
        session = open_session(self.bundle / self.manifest.trunk_file(device), device, threads, exact=exact)
        check_graph(session, self.manifest.trunk, self.manifest)
        return session

    @cached_property
    def _shared(self) -> Mapping[str, ort.OrtValue]:
        """What all tails share; other devices have copies of their own."""
        return map_shared(self.bundle, self.manifest) if self.capabilities.device == "cpu" else {}

    def close(self) -> None:
        for bound in (self._bound_trunks, self._bound_prefills, self._bound_tails):
            bound.clear()
        self._finalizer()

    def resize(self, capacity: int, lengths: Sequence[int]) -> None:
        super().resize(capacity, lengths)
        self._bound_trunks.clear()
        self._bound_prefills.clear()

    def run_trunk(self, plan: Plan, batch: int) -> None:
        _kept(self._bound_trunks, (plan.name, batch), lambda: self._bind_trunk(plan, batch)).run()

    def run_tail(self, kind: PassKind) -> None:
        plan, batch = kind.plan, kind.batch
        _kept(self._bound_tails, (plan.name, kind.sampler, batch), lambda: self._bind_tail(kind)).run()
        if kind.logprobs:
            _kept(self._bound_tails, (plan.name, "logprobs", batch), lambda: self._bind_logprobs(plan, batch)).run()

    def _run_pass(self, kind: PassKind) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        self.run_trunk(kind.plan, kind.batch)
        self.run_tail(kind)
        read = self.buffers.read
        return read("count", (kind.batch,), np.int64), read("emitted", (kind.batch, kind.plan.max_emitted), np.int64)

    def _run_prefill(self, slot: int, plan: Plan) -> None:
        _kept(self._bound_prefills, (plan.width, slot), lambda: self._bind_prefill(slot, plan)).run()

    def _bind_trunk(self, plan: Plan, batch: int) -> Bound:
        bindings = self.bindings.trunk(plan, batch)
        past, present = self._cache_tensors(0, batch)
        return self._bind(self._trunk, bindings.inputs, bindings.outputs, past, present)

    def _bind_prefill(self, slot: int, plan: Plan) -> Bound:
        bindings = self.bindings.trunk(plan, 1, prefill=True)
        past, present = self._cache_tensors(slot, 1)
        return self._bind(self._trunk, bindings.inputs, bindings.outputs, past, present)

    def _cache_tensors(self, slot: int, batch: int) -> tuple[list[BoundTensor], list[BoundTensor]]:
        """Past and present are the same memory: without that, every pass would copy the cache."""
        cache = self.cache
        past = [BoundTensor(name, cache.dtype, cache.shape(batch), address) for name, address in cache.places(slot)]
        return past, [BoundTensor(t.name.replace(CACHE, PRESENT, 1), t.dtype, t.shape, t.address) for t in past]

    def _bind_tail(self, kind: PassKind) -> Bound:
        bindings = self.bindings.tail(kind.plan, kind.sampler, kind.batch)
        session = self._tail_session(self.bindings.tail_graph(kind.plan, kind.sampler))
        return self._bind(session, bindings.inputs, bindings.outputs)

    def _bind_logprobs(self, plan: Plan, batch: int) -> Bound:
        bindings = self.bindings.logprobs(plan, batch)
        return self._bind(self._tail_session(self.manifest.logprobs), bindings.inputs, bindings.outputs)

    def _bind(
        self,
        session: ort.InferenceSession,
        inputs: Sequence[Binding],
        outputs: Sequence[Binding],
        more_inputs: Sequence[BoundTensor] = (),
        more_outputs: Sequence[BoundTensor] = (),
    ) -> Bound:
        first, second = (
            [BoundTensor(b.tensor, b.dtype, b.shape, self.buffers.at(b)) for b in bs] for bs in (inputs, outputs)
        )
        return bind(session, self.capabilities.device, [*first, *more_inputs], [*second, *more_outputs])

    def _tail_session(self, graph: Graph) -> ort.InferenceSession:
        """One thread: a second pool would spin on the cores that the trunk's next pass needs (it doubled a pass)."""
        if graph.file not in self._tails:
            device = self.capabilities.device
            session = open_session(self.bundle / graph.file, device, threads=1, shared=self._shared)
            check_graph(session, graph)
            self._tails[graph.file] = session
        return self._tails[graph.file]


def _kept(kept: dict[Key, Bound], key: Key, make: Callable[[], Bound]) -> Bound:
    if key not in kept:
        kept[key] = make()
    return kept[key]


def following_capacities(maximum: int) -> tuple[int, ...]:
    """64, 128, ... up to and including `maximum`, an eighth apart at most where they are long.

    Attention on the CPU pays for every column of the cache. Copying it now and then is next to nothing beside that.
    """
    sizes, size = [], COLUMNS
    while size < maximum:
        sizes.append(size)
        size += max(COLUMNS, size // 8 // COLUMNS * COLUMNS)
    return (*sizes, maximum)


def doubling_capacities(maximum: int) -> tuple[int, ...]:
    """256, 512, ... up to and including `maximum`: every one is captured as CUDA graphs of its own."""
    sizes, size = [], FIRST_CAPACITY
    while size < maximum:
        sizes.append(size)
        size *= 2
    return (*sizes, maximum)


CAPACITIES: Mapping[str, Callable[[int], tuple[int, ...]]] = {"cpu": following_capacities, "cuda": doubling_capacities}
