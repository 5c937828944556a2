"""A backend whose trunk recites a text: its logits come from two functions of the position, and all
else is real. For tests of what surrounds a model (the decoding loop, tails, stop conditions,
statistics), which must know the model's tokens and drafts exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.backends.ort.trunks import Trunks
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.plan import Plan, RowKind

Script = Callable[[int], int]
"""Returns the token id at a position of a text, from 0."""
CERTAIN = np.float32(1e4)
"""The logit of the token to write. Others are 0, so far below that no temperature up to 100 draws
them."""


class ScriptedBackend(OrtBackend):
    """The bundle's tails, on the CPU, after a trunk that predicts `target(position)` in root and
    draft rows, and `drafter(position)` in look-ahead rows."""

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        target: Script,
        drafter: Script,
        *,
        max_batch_size: int = 1,
    ) -> None:
        self._target, self._drafter = target, drafter
        super().__init__(bundle, manifest, "cpu", threads=1, max_batch_size=max_batch_size)

    def _open_trunks(self, _threads: int, _exact: bool) -> Trunks | None:
        return None

    def run_trunk(self, plan: Plan, batch: int) -> None:
        lengths = self.buffers.read("length", (batch,), np.int64)
        for slot, length in enumerate(lengths.tolist()):
            logits = np.zeros((plan.width, self.capabilities.vocab_size), np.float32)
            for i, row in enumerate(plan.rows):
                script = self._drafter if row.kind is RowKind.LOOKAHEAD else self._target
                logits[i, script(length + row.depth + 1)] = CERTAIN
            self.buffers.write_row("logits", slot, logits, np.float32)

    def _run_prefill(self, _slot: int, _plan: Plan, *, scored: bool) -> None:
        """There is no cache to fill."""
        assert not scored
