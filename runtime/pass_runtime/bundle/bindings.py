"""Which buffer every tensor of a graph is bound to: what makes the loop's data flow, for any engine.

Tensors with the same buffer and shape are the same memory: the trunk's logits are the tail's, and outputs that the
manifest's `feeds` names are the memory of the input that they feed, as `next_ids` is the next pass's `input_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from pass_runtime.bundle.manifest import Graph, Manifest, PlanConstants, Tensor
from pass_runtime.bundle.plan import Plan, prefill_plan
from pass_runtime.bundle.sampling import Sampler

CACHE, PRESENT = "past_", "present_"
COLUMNS = "columns"
"""An input that only a trunk for TensorRT has: its length says how many cache columns a pass reads."""
WINDOWS = ("input_ids", "next_ids")
"""A tail's windows: the one that was run, and the next."""
PREFILL = "prefill."
"""Buffers of prefill, which works on one slot while the windows of the others stay."""


@dataclass(frozen=True)
class Binding:
    """A tensor's place: buffer name, shape and dtype. constant: what the buffer holds, None where it is computed.

    by_slot: the buffer has a row for every slot, of which a pass over b slots is bound to the first b.
    """

    tensor: str
    buffer: str
    shape: tuple[int, ...]
    dtype: str
    by_slot: bool = True
    constant: npt.NDArray[Any] | None = None


@dataclass(frozen=True)
class Bindings:
    """Those of one graph in one plan."""

    inputs: Sequence[Binding]
    outputs: Sequence[Binding]


class BundleBindings:
    """The bindings of a bundle's graphs, from its manifest. `positions` is N, the listed ones.

    least_width: rows that an engine wants of a window at least; narrower ones have padding behind them.
    """

    def __init__(self, manifest: Manifest, positions: int, least_width: int = 1) -> None:
        self._manifest, self._positions, self._least_width = manifest, positions, least_width
        self._listed = {plan.name: plan.constants for plan in manifest.plans}

    def constants(self, plan: Plan) -> dict[str, npt.NDArray[Any]]:
        """What the graphs of `plan` are given in every pass, by input name: as the manifest lists it, else computed."""
        listed = self._listed.get(plan.name) or PlanConstants.of(plan, self._manifest.model.vocab_size)
        return listed.arrays()

    def window(self, plan: Plan) -> int:
        """Rows of a window as it lies in memory."""
        return max(plan.width, self._least_width)

    def trunk(self, plan: Plan, batch: int, *, prefill: bool = False) -> Bindings:
        """Of everything but the KV cache. prefill: a window of its own, with one logit row, which the host writes."""
        constants = self.constants(plan)
        width, rows = self.window(plan), 1 if prefill else plan.width
        if width > plan.width:  # rows that nobody reads: a chain behind the window
            constants = self.constants(prefill_plan(width)) | {"logit_rows": constants["logit_rows"]}
        adapted = constants["lookahead_rows"]
        sizes = {"batch": batch, "width": width, "logit_rows": rows, "lookahead_rows": len(adapted)}
        if prefill:
            del constants["logit_rows"]
        graph, scope = self._manifest.trunk, PREFILL if prefill else ""
        inputs = [self._bind(t, sizes, plan, constants, scope) for t in graph.inputs if not t.name.startswith(CACHE)]
        outputs = [self._bind(t, sizes, plan, {}, scope) for t in graph.outputs if not t.name.startswith(PRESENT)]
        return Bindings(inputs, outputs)

    def tail_graph(self, plan: Plan, sampler: Sampler) -> Graph:
        return self._manifest.plan(plan.tail).tails[sampler]

    def tail(self, plan: Plan, sampler: Sampler, batch: int) -> Bindings:
        """Of the tail of `plan`."""
        graph, constants = self.tail_graph(plan, sampler), self.constants(plan)
        sizes = {"batch": batch, "positions": self._positions, "width": plan.width}
        sizes["lookahead_rows"] = len(constants["lookahead_rows"])
        return Bindings(
            [self._bind(self._widened(tensor, plan), sizes, plan, constants) for tensor in graph.inputs],
            [self._bind(self._widened(tensor, plan), sizes, plan, {}) for tensor in graph.outputs],
        )

    def logprobs(self, plan: Plan, batch: int) -> Bindings:
        """Of the graph of log-probabilities, after the tail of `plan`."""
        graph = self._manifest.logprobs
        sizes = {"batch": batch, "width": plan.width, "max_emitted": plan.max_emitted}
        return Bindings(*([self._bind(t, sizes, plan, {}) for t in ts] for ts in (graph.inputs, graph.outputs)))

    def _widened(self, tensor: Tensor, plan: Plan) -> Tensor:
        """A window of an engine's tail, where it lies padded in memory."""
        of = {"input_ids": plan, "next_ids": plan.next}.get(tensor.name, plan)
        if tensor.name not in WINDOWS or tensor.shape[1] != of.width:
            return tensor
        return tensor.model_copy(update={"shape": (tensor.shape[0], self.window(of))})

    def _bind(
        self,
        tensor: Tensor,
        sizes: Mapping[str, int],
        plan: Plan,
        constants: Mapping[str, npt.NDArray[Any]],
        scope: str = "",
    ) -> Binding:
        shape = tuple(sizes[size] if isinstance(size, str) else size for size in tensor.shape)
        constant = constants.get(tensor.name)
        if constant is not None:
            return Binding(tensor.name, f"{scope}{plan.name}.{tensor.name}", shape, tensor.dtype, False, constant)
        by_slot = tensor.shape[0] == "batch" and not scope
        buffer = scope + self._manifest.feeds.get(tensor.name, tensor.name)
        return Binding(tensor.name, buffer, shape, tensor.dtype, by_slot)
