"""Chooses the buffer that every tensor of a graph is bound to, for any engine.

Data flows between graphs and passes in buffers: tensors with the same buffer name and shape share
memory. The trunk's output `logits` is the tail's input, and a tail's output `next_ids` is the input
`input_ids` of the next pass (`fed_input` names these pairs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.manifest import Graph, Manifest, Tensor
from pass_runtime.bundle.plan import Plan, prefill_plan
from pass_runtime.bundle.sampling import Sampler
from pass_runtime.bundle.tensors import PAST, PRESENT, PROCESSED_LOGITS, WINDOW_TENSORS

PREFILL = "prefill."
"""Prefix of the buffers that only prefill uses, so that it changes no slot's window."""


@dataclass(frozen=True)
class Binding:
    """The buffer, shape and dtype of a tensor.

    by_slot: the buffer has a row for every slot, and a pass over b slots is bound to the first b
    rows. row: the shape of such a row: shape[1:] without padding, for which the tensor extends into
    the rows of the next slots.
    constant: what the buffer always holds; None if the host or a graph writes it.
    """

    tensor: str
    buffer: str
    shape: tuple[int, ...]
    dtype: str
    by_slot: bool = True
    row: tuple[int, ...] = ()
    constant: npt.NDArray[Any] | None = None


@dataclass(frozen=True)
class Bindings:
    """The bindings of one graph for passes of one plan."""

    inputs: Sequence[Binding]
    outputs: Sequence[Binding]


class BundleBindings:
    """The bindings of a bundle's graphs, from its manifest.

    positions: N, the number of positions in the tails' inputs of noise offsets.
    padded_width, trunk_width: those of `Capabilities`. Windows are padded at their end.
    """

    def __init__(
        self,
        manifest: Manifest,
        positions: int,
        padded_width: Callable[[int], int],
        trunk_width: Callable[[int, int], int],
    ) -> None:
        self._manifest, self._positions = manifest, positions
        self._padded_width, self._trunk_width = padded_width, trunk_width
        processors = [] if manifest.processors is None else [manifest.processors]
        tails = [tail for plan in manifest.plans for tail in plan.tails.values()]
        graphs = [manifest.trunk, manifest.logprobs, *processors, *tails]
        outputs = {tensor.name for graph in graphs for tensor in graph.outputs}
        self.transient = frozenset(name for name in outputs if fed_input(name) is None)
        """Buffers whose content is not needed after the pass that wrote it."""

    def constants(self, plan: Plan) -> dict[str, npt.NDArray[Any]]:
        """The inputs of `plan`'s graphs that are the same in every pass, by name."""
        constants: dict[str, npt.NDArray[Any]] = {
            "row_position": plan.row_position,
            "window_mask": plan.window_mask,
            "logit_rows": plan.logit_rows,
            "lookahead_rows": plan.lookahead_rows,
            "lookahead_ids": plan.lookahead_ids(self._manifest.model.vocab_size),
        }
        return constants | {"draft_rows": plan.draft_rows} if plan.is_fused else constants

    def trunk(self, plan: Plan, batch: int, *, prefill: bool = False) -> Bindings:
        """The bindings of the trunk, without the KV cache. prefill: use the buffers of prefill, and
        compute the logits of a single row, which the host chooses."""
        constants, width = self.constants(plan), self._trunk_width(plan.width, batch)
        own = {"batch": batch, "width": self._padded_width(plan.width), "logit_rows": plan.width}
        # If products of few rows round differently (`least_rows`), the padding has logits too, as
        # they are such a product.
        rows = 1 if prefill else width if width > own["width"] else plan.width
        if width > plan.width:  # The window is padded to a longer chain.
            constants = self.constants(prefill_plan(width))
            constants["logit_rows"] = np.arange(rows, dtype=np.int64)
        sizes = {"batch": batch, "width": width, "logit_rows": rows}
        own["lookahead_rows"] = sizes["lookahead_rows"] = len(constants["lookahead_rows"])
        if prefill:
            del constants["logit_rows"]
        graph, scope = self._manifest.trunk, PREFILL if prefill else ""
        inputs, outputs = (
            [
                self._bind(t, sizes, plan, known, scope, own)
                for t in tensors
                if not t.name.startswith(cache)
            ]
            for tensors, cache, known in (
                (graph.inputs, PAST, constants),
                (graph.outputs, PRESENT, {}),
            )
        )
        return Bindings(inputs, outputs)

    def tail_graph(self, plan: Plan, sampler: Sampler) -> Graph:
        """The tail that runs after the trunk in a pass of `plan`."""
        return self._manifest.plan(plan.tail).tails[sampler]

    def tail(
        self, plan: Plan, sampler: Sampler, batch: int, *, processed: bool = False
    ) -> Bindings:
        """The bindings of the tail of `plan`. processed: it reads the logits of the processors."""
        graph, constants = self.tail_graph(plan, sampler), self.constants(plan)
        sizes = {"batch": batch, "positions": self._positions, "width": plan.width}
        sizes["lookahead_rows"] = len(constants["lookahead_rows"])
        inputs = [
            self._bind(self._widened(tensor, plan), sizes, plan, constants)
            for tensor in graph.inputs
        ]
        return Bindings(
            _reading_processed(inputs) if processed else inputs,
            [self._bind(self._widened(tensor, plan), sizes, plan, {}) for tensor in graph.outputs],
        )

    def processors(self, graph: Graph, plan: Plan, batch: int, touched: int) -> Bindings:
        """The bindings of the logits processors before the tail of `plan`. touched: the length of
        their token lists."""
        sizes = {
            "batch": batch,
            "width": plan.width,
            "processed_rows": plan.drafts + 1,
            "touched": touched,
        }
        return Bindings(
            *([self._bind(t, sizes, plan, {}) for t in ts] for ts in (graph.inputs, graph.outputs))
        )

    def logprobs(self, plan: Plan, batch: int, *, processed: bool = False) -> Bindings:
        """The bindings of the graph of log-probabilities that follows the tail of `plan`;
        processed: as for `tail`."""
        graph = self._manifest.logprobs
        sizes = {"batch": batch, "width": plan.width, "max_emitted": plan.max_emitted}
        inputs, outputs = (
            [self._bind(t, sizes, plan, {}) for t in ts] for ts in (graph.inputs, graph.outputs)
        )
        return Bindings(_reading_processed(inputs) if processed else inputs, outputs)

    def _widened(self, tensor: Tensor, plan: Plan) -> Tensor:
        """`tensor` with its shape in memory, which for a window includes the padding."""
        window = plan.next if tensor.name == "next_ids" else plan
        if tensor.name not in WINDOW_TENSORS or tensor.shape[1] != window.width:
            return tensor
        width = self._padded_width(window.width)
        return tensor.model_copy(update={"shape": (tensor.shape[0], width)})

    def _bind(
        self,
        tensor: Tensor,
        sizes: Mapping[str, int],
        plan: Plan,
        constants: Mapping[str, npt.NDArray[Any]],
        scope: str = "",
        own: Mapping[str, int] | None = None,
    ) -> Binding:
        """own: the sizes without the padding for the trunk, if they differ from `sizes`."""
        shape, unpadded = (
            tuple(known[size] if isinstance(size, str) else size for size in tensor.shape)
            for known in (sizes, own or sizes)
        )
        constant = constants.get(tensor.name)
        if constant is not None:
            buffer = f"{scope}{plan.name}.{tensor.name}"
            return Binding(tensor.name, buffer, shape, tensor.dtype, False, constant=constant)
        by_slot = tensor.shape[0] == "batch" and not scope
        buffer = scope + (fed_input(tensor.name) or tensor.name)
        return Binding(tensor.name, buffer, shape, tensor.dtype, by_slot, unpadded[1:])


def _reading_processed(inputs: Sequence[Binding]) -> Sequence[Binding]:
    """`inputs` with `logits` bound to the logits that the processors wrote."""
    return [
        replace(each, buffer=PROCESSED_LOGITS) if each.tensor == "logits" else each
        for each in inputs
    ]


def fed_input(output: str) -> str | None:
    """Return the input of the next pass, of another name, that shares the memory of `output`; None
    if there is none."""
    if output == "next_ids":
        return "input_ids"
    for prefix, fed in ((PRESENT, PAST), ("next_", "")):
        if output.startswith(prefix):
            return output.replace(prefix, fed, 1)
    return None
