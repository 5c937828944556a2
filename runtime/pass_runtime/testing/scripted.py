"""A trunk that recites: logits come from two functions of the position, everything else is the real backend.

For tests of what surrounds a model (the loop, the tails, stop rules, statistics) where the model's words and the
quality of its drafts must be known exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.backends.ort.engine import Buffers
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.plan import Plan, RowKind

Script = Callable[[int], int]
CERTAIN = np.float32(1e4)
"""A logit so far above the others (0) that no temperature up to 100 draws anything else."""


class ScriptedTrunk:
    """Predicts `target(position)` in root and draft rows, `drafter(position)` in look-ahead rows."""

    def __init__(self, target: Script, drafter: Script, vocab_size: int, buffers: Buffers) -> None:
        self._target, self._drafter = target, drafter
        self._vocab_size, self._buffers = vocab_size, buffers

    def grow(self, capacity: int, keep: int) -> None:
        """There is no cache to move."""

    def run(self, plan: Plan, logit_rows: npt.NDArray[np.int64] | None = None) -> None:
        if logit_rows is not None:
            return  # prefill: its logits are not read
        length = int(self._buffers.get("length", (1,), np.int64).numpy()[0])
        logits = np.zeros((1, plan.width, self._vocab_size), np.float32)
        for i, row in enumerate(plan.rows):
            script = self._drafter if row.kind is RowKind.LOOKAHEAD else self._target
            logits[0, i, script(length + row.depth + 1)] = CERTAIN
        self._buffers.put("logits", logits)


def scripted_backend(bundle: Path, manifest: Manifest, target: Script, drafter: Script) -> OrtBackend:
    """The bundle's tails behind a ScriptedTrunk, on the CPU."""
    buffers = Buffers("cpu")
    trunk = ScriptedTrunk(target, drafter, manifest.model.vocab_size, buffers)
    return OrtBackend(bundle, manifest, trunk, buffers, "cpu")
