"""Which buffer every tensor of trunk and tail is bound to: what makes the loop's data flow, for any engine.

Tensors with the same buffer name and shape are the same memory: the trunk's logits are the tail's, and what the tail
calls `next_ids` and `next_length` are the next pass's `input_ids` and `length`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.manifest import Graph, Manifest, Tensor
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.sampling import Sampler

CACHE = "past_"
COLUMNS = "columns"
"""An input that only a trunk for TensorRT has: its length says how many cache columns a pass reads."""
_NEXT = {"next_ids": "input_ids", "next_length": "length", "next_draft_probs": "draft_probs"}


@dataclass(frozen=True)
class Slot:
    """A tensor's place: buffer name, shape and dtype. constant: what the buffer holds, None where it is computed."""

    tensor: str
    buffer: str
    shape: tuple[int, ...]
    dtype: str
    constant: npt.NDArray[Any] | None = None


@dataclass(frozen=True)
class Slots:
    """The slots of one graph in one plan."""

    inputs: Sequence[Slot]
    outputs: Sequence[Slot]


def trunk_slots(manifest: Manifest, plan: Plan, rows: npt.NDArray[np.int64] | None = None) -> Slots:
    """Of everything but the KV cache. `rows`: logit rows in place of the plan's own."""
    constants = {
        "row_position": plan.row_position,
        "window_mask": plan.window_mask,
        "logit_rows": plan.logit_rows if rows is None else rows,
        "lookahead_rows": plan.lookahead_rows,
    }
    sizes = {"batch": 1, "width": plan.width, "logit_rows": len(constants["logit_rows"])}
    sizes["lookahead_rows"] = len(plan.lookahead_rows)
    graph = manifest.trunk
    inputs = [_slot(t, sizes, plan, constants) for t in graph.inputs if not t.name.startswith(CACHE)]
    outputs = [_slot(t, sizes, plan, {}) for t in graph.outputs if not t.name.startswith("present_")]
    return Slots(inputs, outputs)


def tail_graph(manifest: Manifest, plan: Plan, sampler: Sampler) -> Graph:
    return manifest.plan(plan.tail).tails[sampler]


def tail_slots(manifest: Manifest, plan: Plan, sampler: Sampler, positions: int) -> Slots:
    """Of the tail of `plan`; `positions` is N, the listed ones."""
    graph = tail_graph(manifest, plan, sampler)
    constants: dict[str, npt.NDArray[Any]] = {}
    if plan.is_fused:
        constants = {"draft_rows": plan.draft_rows, "lookahead_ids": plan.lookahead_ids(manifest.model.vocab_size)}
    sizes = {"batch": 1, "positions": positions, "width": plan.width, "lookahead_rows": len(plan.lookahead_rows)}
    return Slots(
        [_slot(t, sizes, plan, constants) for t in graph.inputs],
        [_slot(t, sizes, plan, {}) for t in graph.outputs],
    )


def _slot(tensor: Tensor, sizes: dict[str, int], plan: Plan, constants: dict[str, npt.NDArray[Any]]) -> Slot:
    shape = tuple(sizes[size] if isinstance(size, str) else size for size in tensor.shape)
    constant = constants.get(tensor.name)
    name = _NEXT.get(tensor.name, tensor.name) if constant is None else f"{plan.name}.{tensor.name}"
    return Slot(tensor.name, name, shape, tensor.dtype, constant)
