"""Whether a graph's outputs may lie in the memory of its inputs, as the runtime binds them."""

from __future__ import annotations

import onnx_ir as ir

SHARED = {"input_ids": "next_ids", "length": "next_length", "draft_probs": "next_draft_probs"}
ELEMENTWISE = ("Add", "Where")
"""Operators that write each element after all reads of the same element of their inputs."""


def late_readers(graph: ir.Graph) -> list[str]:
    """Nodes that may read an input after the output that shares its memory was written."""
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    found = []
    for read, written in SHARED.items():
        if read in inputs and written in outputs:
            writer = outputs[written].producer()
            before = _ancestors(writer) - (set() if writer.op_type in ELEMENTWISE else {writer})
            late = [node.op_type for node in inputs[read].consumers() if node not in before]
            found += [f"{op_type} may read {read} after {written} is written" for op_type in late]
    return found


def _ancestors(node: ir.Node) -> set[ir.Node]:
    found, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [
                value.producer()
                for value in node.inputs
                if value is not None and value.producer() is not None
            ]
    return found
