"""ONNX Runtime backend: trunk and tails joined by buffers that stay on the device.

The trunk's logits are the tail's, and the tail's `next_ids` and `next_length` are the next window's `input_ids`
and `length`. A step is two `run_with_iobinding` calls and the copy of a few integers to the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from pass_runtime.backend import Backend, Capabilities
from pass_runtime.manifest import Manifest
from pass_runtime.noise import STREAMS
from pass_runtime.ort_engine import Buffers, choose_device, open_session
from pass_runtime.ort_trunk import OrtTrunk
from pass_runtime.plan import Plan, prefill_plan
from pass_runtime.sampling import SamplingParams

FIRST_CAPACITY = 256
PREFILL_WIDTHS = (256, 64, 16, 1)


class TrunkRunner(Protocol):
    """What the backend asks of a trunk; `pass_runtime.scripted` has another one."""

    def grow(self, capacity: int, keep: int) -> None: ...
    def run(self, plan: Plan, logit_rows: npt.NDArray[np.int64] | None = None) -> None: ...


@dataclass(frozen=True)
class BoundTail:
    """A tail graph bound to the buffers; `emitted` [1,E] and `count` [1] are what the host reads."""

    session: ort.InferenceSession
    binding: ort.IOBinding
    emitted: ort.OrtValue
    count: ort.OrtValue

    def run(self) -> list[int]:
        self.session.run_with_iobinding(self.binding)
        count = int(self.count.numpy()[0])
        tokens: list[int] = self.emitted.numpy()[0, :count].tolist()
        return tokens


class OrtBackend(Backend):
    """Drives any trunk through the bundle's tail graphs."""

    def __init__(self, bundle: Path, manifest: Manifest, trunk: TrunkRunner, buffers: Buffers, device: str) -> None:
        capacities = doubling_capacities(manifest.model.max_capacity)
        super().__init__(Capabilities(device, manifest.model.vocab_size, capacities, PREFILL_WIDTHS))
        self._bundle, self._manifest = bundle, manifest
        self._trunk, self._buffers = trunk, buffers
        self._tail_sessions: dict[str, ort.InferenceSession] = {}  # by file
        self._tails: dict[tuple[str, str], BoundTail] = {}  # by plan and sampler
        self._params = SamplingParams()

    @classmethod
    def open(cls, bundle: Path, manifest: Manifest, device: str = "cpu", threads: int = 0) -> OrtBackend:
        """The bundle's own trunk on `device` (cpu, cuda or auto)."""
        device = choose_device(device)
        buffers = Buffers(device)
        return cls(bundle, manifest, OrtTrunk(bundle, manifest, buffers, device, threads), buffers, device)

    def _begin(self, params: SamplingParams) -> None:
        self._params = params
        if params.sampler == "greedy":
            return
        for stream in STREAMS if self._manifest.rule == "rejection" else STREAMS[:1]:
            self._buffers.put(stream, self._noise_offsets(params.seed, stream)[None])
        self._buffers.put("temperature", np.array([params.temperature], np.float32))
        self._buffers.put("top_k", np.array([params.top_k], np.int64))
        self._buffers.put("top_p", np.array([params.top_p], np.float32))

    def _grow(self, capacity: int) -> None:
        self._trunk.grow(capacity, self.length)

    def _prefill(self, tokens: Sequence[int], width: int) -> None:
        ids = np.zeros((1, width), np.int64)
        ids[0, : len(tokens)] = tokens
        self._put_window(ids)
        self._trunk.run(prefill_plan(width), np.array([len(tokens) - 1], np.int64))

    def _enter(self, ids: npt.NDArray[np.int64], plan: Plan) -> None:
        self._put_window(ids[None])
        if plan.drafts and self._manifest.rule == "rejection" and self._params.sampler != "greedy":
            # A draft from elsewhere was certain to be drawn; one that is missing could not be.
            vocab = self.capabilities.vocab_size
            drafts = ids[1 : 1 + plan.drafts, None] == np.arange(vocab)
            self._buffers.put("draft_probs", drafts[None].astype(np.float32))

    def _put_window(self, ids: npt.NDArray[np.int64]) -> None:
        self._buffers.put("input_ids", ids)
        self._buffers.put("length", np.array([self.length], np.int64))

    def _step(self, plan: Plan) -> list[int]:
        self._trunk.run(plan)
        return self._tail(plan).run()

    def _time(self, plan: Plan) -> tuple[float, float]:
        started = time.perf_counter()
        self._trunk.run(plan)
        between = time.perf_counter()
        self._tail(plan).run()
        return between - started, time.perf_counter() - between

    def last_logits(self) -> npt.NDArray[np.float32]:
        vocab = self.capabilities.vocab_size
        logits: npt.NDArray[np.float32] = self._buffers.get("logits", (1, 1, vocab), np.float32).numpy()[0]
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
        buffers, vocab = self._buffers, self.capabilities.vocab_size
        graph = self._manifest.plan(plan.tail).tails[self._params.sampler]
        sizes = {"batch": 1, "positions": self.capabilities.positions, "width": plan.width}
        sizes["lookahead_rows"] = len(plan.lookahead_rows)
        shared = {"next_ids": "input_ids", "next_length": "length", "next_draft_probs": "draft_probs"}
        if plan.is_fused:
            for name, array in (("draft_rows", plan.draft_rows), ("lookahead_ids", plan.lookahead_ids(vocab))):
                shared[name] = f"{plan.name}.{name}"
                buffers.put(shared[name], array)
        session = self._tail_session(graph.file)
        binding = session.io_binding()
        values: dict[str, ort.OrtValue] = {}
        for tensor in (*graph.inputs, *graph.outputs):
            shape = tuple(sizes[size] if isinstance(size, str) else size for size in tensor.shape)
            values[tensor.name] = buffers.get(shared.get(tensor.name, tensor.name), shape, tensor.dtype)
        for tensor in graph.inputs:
            binding.bind_ortvalue_input(tensor.name, values[tensor.name])
        for tensor in graph.outputs:
            binding.bind_ortvalue_output(tensor.name, values[tensor.name])
        return BoundTail(session, binding, values["emitted"], values["count"])


def doubling_capacities(maximum: int) -> tuple[int, ...]:
    """512, 1024, ... up to and including `maximum`: unused capacity costs attention time."""
    sizes, size = [], FIRST_CAPACITY
    while size < maximum:
        sizes.append(size)
        size *= 2
    return (*sizes, maximum)
