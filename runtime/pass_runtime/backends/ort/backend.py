"""ONNX Runtime backend: trunk and tails joined by buffers that stay on the device.

The trunk's logits are the tail's, and the tail's `next_ids` and `next_length` are the next window's `input_ids`
and `length`. A step is two `run_with_iobinding` calls and the copy of a few integers to the host.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from pass_runtime.backends.base import Capabilities
from pass_runtime.backends.graph_backend import GraphBackend
from pass_runtime.backends.ort.engine import Bound, Buffers, choose_device, open_session
from pass_runtime.backends.ort.trunk import OrtTrunk
from pass_runtime.bundle.bindings import tail_graph, tail_slots
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.plan import Plan
from pass_runtime.errors import PassError

FIRST_CAPACITY = 256
PREFILL_WIDTHS = (256, 64, 16, 1)


class TrunkRunner(Protocol):
    """What the backend asks of a trunk; `pass_runtime.testing.scripted` has another one."""

    def grow(self, capacity: int, keep: int) -> None: ...
    def run(self, plan: Plan, logit_rows: npt.NDArray[np.int64] | None = None) -> None: ...


@dataclass(frozen=True)
class BoundTail:
    """A tail graph bound to the buffers; `emitted` [1,E] and `count` [1] are what the host reads."""

    graph: Bound
    emitted: ort.OrtValue
    count: ort.OrtValue

    def run(self) -> list[int]:
        self.graph.run()
        count = int(self.count.numpy()[0])
        tokens: list[int] = self.emitted.numpy()[0, :count].tolist()
        return tokens


class OrtBackend(GraphBackend):
    """Drives any trunk through the bundle's tail graphs."""

    def __init__(self, bundle: Path, manifest: Manifest, trunk: TrunkRunner, buffers: Buffers, device: str) -> None:
        capacities = doubling_capacities(manifest.model.max_capacity)
        capabilities = Capabilities(device, manifest.model.vocab_size, capacities, PREFILL_WIDTHS)
        super().__init__(bundle, manifest, capabilities, buffers)
        self._trunk, self._buffers = trunk, buffers
        self._tail_sessions: dict[str, ort.InferenceSession] = {}  # by file
        self._tails: dict[tuple[str, str], BoundTail] = {}  # by plan and sampler

    @classmethod
    def open(cls, bundle: Path, manifest: Manifest, device: str = "cpu", threads: int = 0) -> OrtBackend:
        """The bundle's own trunk on `device` (cpu, cuda or auto)."""
        device = choose_device(device)
        if manifest.model.dtype == "bfloat16":
            raise PassError("bf16 bundles run on TensorRT engines; for ONNX Runtime export with --dtype fp16 or fp32")
        buffers = Buffers(device)
        return cls(bundle, manifest, OrtTrunk(bundle, manifest, buffers, device, threads), buffers, device)

    def _grow(self, capacity: int) -> None:
        self._trunk.grow(capacity, self.length)

    def _run_prefill(self, plan: Plan, logit_rows: npt.NDArray[np.int64]) -> None:
        self._trunk.run(plan, logit_rows)

    def _step(self, plan: Plan) -> list[int]:
        self._trunk.run(plan)
        return self._tail(plan).run()

    def _time(self, plan: Plan) -> tuple[float, float]:
        started = time.perf_counter()
        self._trunk.run(plan)
        between = time.perf_counter()
        self._tail(plan).run()
        return between - started, time.perf_counter() - between

    def logits(self, plan: Plan) -> npt.NDArray[np.float32]:
        shape = (1, plan.width, self.capabilities.vocab_size)
        # on the CPU, numpy() shows the buffer itself
        logits: npt.NDArray[np.float32] = self._buffers.get("logits", shape, np.float32).numpy()[0].copy()
        return logits

    def _tail(self, plan: Plan) -> BoundTail:
        key = (plan.name, self._params.sampler)
        if key not in self._tails:
            self._tails[key] = self._bind_tail(plan)
        return self._tails[key]

    def _tail_session(self, file: str) -> ort.InferenceSession:
        """One thread: a second pool would spin on the cores that the trunk's next pass needs (it doubled a pass)."""
        if file not in self._tail_sessions:
            self._tail_sessions[file] = open_session(self._bundle / file, self.capabilities.device, threads=1)
        return self._tail_sessions[file]

    def _bind_tail(self, plan: Plan) -> BoundTail:
        sampler = self._params.sampler
        slots = tail_slots(self._manifest, plan, sampler, self.capabilities.positions)
        session = self._tail_session(tail_graph(self._manifest, plan, sampler).file)
        binding = session.io_binding()
        for slot in slots.inputs:
            binding.bind_ortvalue_input(slot.tensor, self._buffers.at(slot))
        outputs = {slot.tensor: self._buffers.at(slot) for slot in slots.outputs}
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        return BoundTail(Bound(session, binding), outputs["emitted"], outputs["count"])


def doubling_capacities(maximum: int) -> tuple[int, ...]:
    """512, 1024, ... up to and including `maximum`: unused capacity costs attention time."""
    sizes, size = [], FIRST_CAPACITY
    while size < maximum:
        sizes.append(size)
        size *= 2
    return (*sizes, maximum)
