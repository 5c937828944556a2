"""Chooses the buffer of each input and output of a bundle's graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.manifest import Graph, Manifest, Tensor
from pass_runtime.bundle.sampling import Sampler
from pass_runtime.bundle.tensors import PAST, PRESENT, PROCESSED_LOGITS, WINDOW_TENSORS
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
    inputs: Sequence[Binding]
    outputs: Sequence[Binding]


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
        sizes["lookahead_rows"] = len(constants["lookahead_rows"])
        if one_row:
            del constants["logit_rows"]
        graph, scope = self._manifest.trunk, PREFILL if prefill else ""
        inputs = [each for each in graph.inputs if not each.name.startswith(PAST)]
        outputs = [each for each in graph.outputs if not each.name.startswith(PRESENT)]
        return Bindings(
            [self._bind(each, sizes, window, constants, scope) for each in inputs],
            [self._bind(each, sizes, window, {}, scope) for each in outputs],
        )

    def tail_graph(self, window: Window, sampler: Sampler) -> Graph:
        """Return the tail graph that runs after the trunk in a pass of `window`."""
        return self._manifest.window(window.tail).tails[sampler]

    def tail(
        self, window: Window, sampler: Sampler, batch: int, *, processed: bool = False
    ) -> Bindings:
        graph, constants = self.tail_graph(window, sampler), self.constants(window)
        sizes = {"batch": batch, "positions": self._positions, "width": window.width}
        sizes["lookahead_rows"] = len(constants["lookahead_rows"])
        inputs = [
            self._bind(self._widened(tensor, window), sizes, window, constants)
            for tensor in graph.inputs
        ]
        return Bindings(
            _reading_processed(inputs) if processed else inputs,
            [
                self._bind(self._widened(tensor, window), sizes, window, {})
                for tensor in graph.outputs
            ],
        )

    def processors(self, graph: Graph, window: Window, batch: int, touched: int) -> Bindings:
        """Return the bindings of `graph`, the logits processors, before the tail of `window`."""
        sizes = {"batch": batch, "width": window.width, "touched": touched}
        sizes["processed_rows"] = window.drafts + 1
        return Bindings(
            [self._bind(tensor, sizes, window, {}) for tensor in graph.inputs],
            [self._bind(tensor, sizes, window, {}) for tensor in graph.outputs],
        )

    def logprobs(
        self, window: Window, batch: int, *, processed: bool = False, scope: str = ""
    ) -> Bindings:
        graph = self._manifest.logprobs
        sizes = {"batch": batch, "width": window.width, "max_emitted": window.max_emitted}
        inputs = [self._bind(tensor, sizes, window, {}, scope) for tensor in graph.inputs]
        return Bindings(
            _reading_processed(inputs) if processed else inputs,
            [self._bind(tensor, sizes, window, {}, scope) for tensor in graph.outputs],
        )

    def _widened(self, tensor: Tensor, window: Window) -> Tensor:
        """A window's ids include the padding."""
        rows = (window.next if tensor.name == "next_ids" else window).width
        if tensor.name not in WINDOW_TENSORS or tensor.shape[1] != rows:
            return tensor
        width = self._padded_width(rows)
        return tensor.model_copy(update={"shape": (tensor.shape[0], width)})

    def _bind(
        self,
        tensor: Tensor,
        sizes: Mapping[str, int],
        window: Window,
        constants: Mapping[str, npt.NDArray[Any]],
        scope: str = "",
    ) -> Binding:
        shape = tuple(sizes[size] if isinstance(size, str) else size for size in tensor.shape)
        constant = constants.get(tensor.name)
        if constant is not None:
            buffer = f"{scope}{window.name}.{tensor.name}"
            return Binding(
                tensor.name, buffer, shape, tensor.dtype, by_slot=False, constant=constant
            )
        by_slot = tensor.shape[0] == "batch" and not scope
        buffer = scope + (fed_input(tensor.name) or tensor.name)
        return Binding(tensor.name, buffer, shape, tensor.dtype, by_slot)


def _reading_processed(inputs: Sequence[Binding]) -> Sequence[Binding]:
    return [
        replace(each, buffer=PROCESSED_LOGITS) if each.tensor == "logits" else each
        for each in inputs
    ]


def fed_input(output: str) -> str | None:
    """Return the input of another name whose memory `output` shares."""
    if output == "next_ids":
        return "input_ids"
    for output_prefix, input_prefix in ((PRESENT, PAST), ("next_", "")):
        if output.startswith(output_prefix):
            return output.replace(output_prefix, input_prefix, 1)
    return None
