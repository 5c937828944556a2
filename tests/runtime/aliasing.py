from __future__ import annotations

import onnx_ir as ir

SHARED = {"input_ids": "next_ids", "length": "next_length", "draft_probs": "next_draft_probs"}
"""Inputs of tails, and the outputs that the runtime binds to their memory."""
ELEMENTWISE = ("Add", "Where")
"""Operators that write each element after all reads of the same element of their inputs."""


def late_readers(graph: ir.Graph) -> list[str]:
    """Name the nodes that may read an input after the output in its memory is written."""
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    lines = []
    for read, written in SHARED.items():
        if read in inputs and written in outputs:
            writer = outputs[written].producer()
            earlier = _ancestors(writer) - (set() if writer.op_type in ELEMENTWISE else {writer})
            late = [node.op_type for node in inputs[read].consumers() if node not in earlier]
            lines += [f"{op_type} may read {read} after {written} is written" for op_type in late]
    return lines


def _ancestors(node: ir.Node) -> set[ir.Node]:
    ancestors, pending = set(), [node]
    while pending:
        node = pending.pop()
        if node not in ancestors:
            ancestors.add(node)
            producers = [value.producer() for value in node.inputs if value is not None]
            pending += [producer for producer in producers if producer is not None]
    return ancestors
