"""The trunk on ONNX Runtime: one session for every window width, and a KV cache bound in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from pass_runtime.backends.ort.engine import Bound, Buffers, open_session
from pass_runtime.bundle.bindings import trunk_slots
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.plan import Plan


class OrtTrunk:
    """Reads `input_ids` [1,Q] and `length` [1], writes `logits` [1,R,V], all in `buffers`.

    Each cache tensor is one OrtValue bound as `past` and as `present`: without that, every pass copies the cache.
    """

    def __init__(self, bundle: Path, manifest: Manifest, buffers: Buffers, device: str, threads: int) -> None:
        self._manifest, self._buffers = manifest, buffers
        self._session = open_session(bundle / manifest.trunk.file, device, threads)
        self._cache: dict[str, ort.OrtValue] = {}
        self._bindings: dict[str, Bound] = {}  # by plan, for the current capacity

    def grow(self, capacity: int, keep: int) -> None:
        """Move the first `keep` cache entries into buffers of `capacity`."""
        model = self._manifest.model
        self._bindings.clear()
        for tensor in self._manifest.trunk.inputs:
            if tensor.name.startswith("past_"):
                grown = np.zeros((1, model.kv_heads, capacity, model.head_dim), tensor.dtype)
                if keep:
                    grown[:, :, :keep] = self._cache[tensor.name].numpy()[:, :, :keep]
                self._cache[tensor.name] = self._buffers.new(grown)

    def run(self, plan: Plan, logit_rows: npt.NDArray[np.int64] | None = None) -> None:
        """One pass over `plan`'s window. `logit_rows` [R] replaces the plan's own (prefill wants one row)."""
        if logit_rows is not None:
            self._buffers.put(f"{plan.name}.logit_rows", logit_rows)
        binding = self._bindings.get(plan.name)
        if binding is None:
            binding = self._bindings[plan.name] = self._bind(plan, logit_rows)
        binding.run()

    def _bind(self, plan: Plan, logit_rows: npt.NDArray[np.int64] | None) -> Bound:
        slots = trunk_slots(self._manifest, plan, logit_rows)
        binding = self._session.io_binding()
        for slot in slots.inputs:
            binding.bind_ortvalue_input(slot.tensor, self._buffers.at(slot))
        for slot in slots.outputs:
            binding.bind_ortvalue_output(slot.tensor, self._buffers.at(slot))
        for name, value in self._cache.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_", "present_"), value)
        return Bound(self._session, binding)
