"""Chooses the buffer of each input and output of a bundle's graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.manifest import Graph, Manifest, Tensor
from pass_runtime.bundle.tensors import (
    LOOKAHEAD_ROWS,
    PAST,
    PRESENT,
    PROCESSED_LOGITS,
    WINDOW_TENSORS,
)
from pass_runtime.bundle.window import Window, prefill_window

PREFILL = "prefill."
"""Of buffers that only prefill uses: a prefill changes no slot's window."""


@dataclass(frozen=True)
class Binding:
    """by_slot: the buffer has a row for every slot; a pass is bound to the first ones. constant:
    its content, if it never changes."""

    tensor: str
    buffer: str
    shape: tuple[int, ...]
    dtype: str
    by_slot: bool = True
    constant: npt.NDArray[Any] | None = None


@dataclass(frozen=True)
class Bindings:
    """sizes: of the graph's symbolic dimensions."""

    inputs: Sequence[Binding]
    outputs: Sequence[Binding]
    sizes: Mapping[str, int]


class BundleBindings:
    """positions: `Capabilities.noise_positions`. padded_width: the method of `Capabilities`;
    padding follows a window's last row."""

    def __init__(
        self, manifest: Manifest, positions: int, padded_width: Callable[[int], int]
    ) -> None:
        self._manifest, self._positions = manifest, positions
        self._padded_width = padded_width
        outputs = {tensor.name for graph in manifest.graphs for tensor in graph.outputs}
        self.transient = frozenset(name for name in outputs if fed_input(name) is None)
        """The buffers whose content is not needed after the pass."""

    def constants(self, window: Window) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs that are the same in every pass of `window`."""
        constants: dict[str, npt.NDArray[Any]] = {
            "row_position": window.row_position,
            "window_mask": window.window_mask,
            "logit_rows": window.logit_rows,
            "lookahead_rows": window.lookahead_rows,
            "lookahead_ids": window.lookahead_ids(self._manifest.model.vocab_size),
        }
        return constants | {"draft_rows": window.draft_rows} if window.is_fused else constants

    def trunk(
        self, window: Window, batch: int, *, prefill: bool = False, scored: bool = False
    ) -> Bindings:
        """All but the KV cache."""
        constants, width = self.constants(window), self._padded_width(window.width)
        one_row = prefill and not scored
        logit_rows = 1 if one_row else window.width
        if width > window.width:  # Only a window of one row is padded, to a chain of two.
            constants = self.constants(prefill_window(width))
            constants["logit_rows"] = np.arange(logit_rows, dtype=np.int64)
        sizes = {"batch": batch, "width": width, "logit_rows": logit_rows}
        has_lookahead = any(each.name == LOOKAHEAD_ROWS for each in self._manifest.trunk.inputs)
        sizes["lookahead_rows"] = len(constants[LOOKAHEAD_ROWS]) if has_lookahead else 0
        if one_row:
            del constants["logit_rows"]
        scope = PREFILL if prefill else ""
        return self._bindings(self._manifest.trunk, window, sizes, constants, scope)

    def after_trunk(
        self,
        graph: Graph,
        window: Window,
        batch: int,
        *,
        touched: int = 0,
        processed: bool = False,
        scope: str = "",
    ) -> Bindings:
        """Of the logits processors, a tail, or the log-probabilities. touched: T of the processors.
        processed: read the processors' logits."""
        constants = self.constants(window)
        sizes = {
            "batch": batch,
            "width": window.width,
            "lookahead_rows": len(constants["lookahead_rows"]),
            "positions": self._positions,
            "max_emitted": window.max_emitted,
            "processed_rows": window.drafts + 1,
            "touched": touched,
        }
        bindings = self._bindings(graph, window, sizes, constants, scope)
        if not processed:
            return bindings
        inputs = [
            replace(each, buffer=PROCESSED_LOGITS) if each.tensor == "logits" else each
            for each in bindings.inputs
        ]
        return replace(bindings, inputs=inputs)

    def _bindings(
        self,
        graph: Graph,
        window: Window,
        sizes: Mapping[str, int],
        constants: Mapping[str, npt.NDArray[Any]],
        scope: str,
    ) -> Bindings:
        def bind(tensor: Tensor) -> Binding:
            shape = tuple(sizes[size] if isinstance(size, str) else size for size in tensor.shape)
            rows = (window.next if tensor.name == "next_ids" else window).width
            if tensor.name in WINDOW_TENSORS and tensor.shape[1] == rows:
                shape = (shape[0], self._padded_width(rows))
            if (constant := constants.get(tensor.name)) is not None:
                buffer = f"{scope}{window.name}.{tensor.name}"
                return Binding(tensor.name, buffer, shape, tensor.dtype, False, constant)
            by_slot = tensor.shape[0] == "batch" and not scope
            buffer = scope + (fed_input(tensor.name) or tensor.name)
            return Binding(tensor.name, buffer, shape, tensor.dtype, by_slot)

        return Bindings(
            [bind(tensor) for tensor in graph.inputs if not tensor.name.startswith(PAST)],
            [bind(tensor) for tensor in graph.outputs if not tensor.name.startswith(PRESENT)],
            sizes,
        )


def fed_input(output: str) -> str | None:
    """Return the input of another name whose memory `output` shares."""
    if output == "next_ids":
        return "input_ids"
    for output_prefix, input_prefix in ((PRESENT, PAST), ("next_", "")):
        if output.startswith(output_prefix):
            return output.replace(output_prefix, input_prefix, 1)
    return None
