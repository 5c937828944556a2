"""Chooses the buffer to which a backend binds each input and output of a bundle's graphs.

Tensors share memory if their buffers have the same name and shape: this is how data flows from one
graph to the next, and from one pass to the next. A buffer has its tensor's name, so the trunk's
output `logits` and the tail's input `logits` share one. An output that is an input of the next pass
under another name (`next_ids` is `input_ids`) is bound to that input's buffer (`fed_input`).
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
"""Prefix of the buffers that only prefill uses, so that a prefill changes no slot's window."""


@dataclass(frozen=True)
class Binding:
    """A tensor with its buffer, shape and dtype.

    by_slot: whether the buffer has a row for every slot; a pass over b slots is then bound to the
    first b rows. constant: the content of a buffer that never changes; None if the host or a graph
    writes it.
    """

    tensor: str
    buffer: str
    shape: tuple[int, ...]
    dtype: str
    by_slot: bool = True
    constant: npt.NDArray[Any] | None = None


@dataclass(frozen=True)
class Bindings:
    """The bindings of one graph for passes of one plan."""

    inputs: Sequence[Binding]
    outputs: Sequence[Binding]


class BundleBindings:
    """The bindings of a bundle's graphs, from its manifest.

    positions: `Capabilities.noise_positions`. padded_width: the method of `Capabilities`. The
    padding of a window follows its last row.
    """

    def __init__(
        self, manifest: Manifest, positions: int, padded_width: Callable[[int], int]
    ) -> None:
        self._manifest, self._positions = manifest, positions
        self._padded_width = padded_width
        outputs = {tensor.name for graph in manifest.graphs for tensor in graph.outputs}
        self.transient = frozenset(name for name in outputs if fed_input(name) is None)
        """Names of the buffers whose content is not needed after the pass that wrote it."""

    def constants(self, plan: Plan) -> dict[str, npt.NDArray[Any]]:
        """Return, by name, the inputs of `plan`'s graphs that are the same in every pass."""
        constants: dict[str, npt.NDArray[Any]] = {
            "row_position": plan.row_position,
            "window_mask": plan.window_mask,
            "logit_rows": plan.logit_rows,
            "lookahead_rows": plan.lookahead_rows,
            "lookahead_ids": plan.lookahead_ids(self._manifest.model.vocab_size),
        }
        return constants | {"draft_rows": plan.draft_rows} if plan.is_fused else constants

    def trunk(
        self, plan: Plan, batch: int, *, prefill: bool = False, scored: bool = False
    ) -> Bindings:
        """Return the bindings of the trunk's tensors but for the KV cache. prefill: use the buffers
        of prefill, and unless `scored` compute the logits of a single row, which the host
        chooses."""
        constants, width = self.constants(plan), self._padded_width(plan.width)
        one_row = prefill and not scored
        logit_rows = 1 if one_row else plan.width
        if width > plan.width:  # Only a window of one row is padded, to a chain of two rows.
            constants = self.constants(prefill_plan(width))
            constants["logit_rows"] = np.arange(logit_rows, dtype=np.int64)
        sizes = {"batch": batch, "width": width, "logit_rows": logit_rows}
        sizes["lookahead_rows"] = len(constants["lookahead_rows"])
        if one_row:
            del constants["logit_rows"]
        graph, scope = self._manifest.trunk, PREFILL if prefill else ""
        inputs = [each for each in graph.inputs if not each.name.startswith(PAST)]
        outputs = [each for each in graph.outputs if not each.name.startswith(PRESENT)]
        return Bindings(
            [self._bind(each, sizes, plan, constants, scope) for each in inputs],
            [self._bind(each, sizes, plan, {}, scope) for each in outputs],
        )

    def tail_graph(self, plan: Plan, sampler: Sampler) -> Graph:
        """Return the tail graph that runs after the trunk in a pass of `plan`."""
        return self._manifest.plan(plan.tail).tails[sampler]

    def tail(
        self, plan: Plan, sampler: Sampler, batch: int, *, processed: bool = False
    ) -> Bindings:
        """Return the bindings of the tail of `plan`. processed: whether the tail reads the logits
        that the logits processors wrote, and not the trunk's."""
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
        """Return the bindings of `graph`, the logits processors, before the tail of `plan`.
        touched: T, the length of the processors' lists of tokens."""
        sizes = {"batch": batch, "width": plan.width, "touched": touched}
        sizes["processed_rows"] = plan.drafts + 1
        return Bindings(
            [self._bind(tensor, sizes, plan, {}) for tensor in graph.inputs],
            [self._bind(tensor, sizes, plan, {}) for tensor in graph.outputs],
        )

    def logprobs(
        self, plan: Plan, batch: int, *, processed: bool = False, scope: str = ""
    ) -> Bindings:
        """Return the bindings of the graph of log-probabilities. processed: as for `tail`. scope:
        PREFILL after a prompt chunk, whose next tokens stand in the place of emitted ones."""
        graph = self._manifest.logprobs
        sizes = {"batch": batch, "width": plan.width, "max_emitted": plan.max_emitted}
        inputs = [self._bind(tensor, sizes, plan, {}, scope) for tensor in graph.inputs]
        return Bindings(
            _reading_processed(inputs) if processed else inputs,
            [self._bind(tensor, sizes, plan, {}, scope) for tensor in graph.outputs],
        )

    def _widened(self, tensor: Tensor, plan: Plan) -> Tensor:
        """Return `tensor` with its shape in memory: a window's ids include the padding."""
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
    ) -> Binding:
        """Bind one tensor of a graph of `plan`. sizes: by name, the symbolic sizes of its shape.
        constants: the constant inputs. scope: the prefix of the buffer's name."""
        shape = tuple(sizes[size] if isinstance(size, str) else size for size in tensor.shape)
        constant = constants.get(tensor.name)
        if constant is not None:
            buffer = f"{scope}{plan.name}.{tensor.name}"
            return Binding(
                tensor.name, buffer, shape, tensor.dtype, by_slot=False, constant=constant
            )
        by_slot = tensor.shape[0] == "batch" and not scope
        buffer = scope + (fed_input(tensor.name) or tensor.name)
        return Binding(tensor.name, buffer, shape, tensor.dtype, by_slot)


def _reading_processed(inputs: Sequence[Binding]) -> Sequence[Binding]:
    """Return `inputs` with `logits` bound to the logits that the logits processors wrote."""
    return [
        replace(each, buffer=PROCESSED_LOGITS) if each.tensor == "logits" else each
        for each in inputs
    ]


def fed_input(output: str) -> str | None:
    """Return the input, of another name, whose memory `output` shares; None if there is none."""
    if output == "next_ids":
        return "input_ids"
    for output_prefix, input_prefix in ((PRESENT, PAST), ("next_", "")):
        if output.startswith(output_prefix):
            return output.replace(output_prefix, input_prefix, 1)
    return None
