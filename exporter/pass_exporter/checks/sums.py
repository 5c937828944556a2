"""Checks one pass of a trunk with 8-bit activations as users run it (fused), against integer sums.

The other checks cannot find sums that saturate: they compare with torch within a limit that is
meant for a correct graph, and large models run without fused products there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from pass_exporter.checks.cases import Array
from pass_exporter.checks.widen import has_static_activations
from pass_runtime.backends.ort.engine import open_session
from pass_runtime.backends.ort.trunks import needs_unsigned_weights
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.errors import PassError

FILE_PREFIX = "sums."
MAX_COLUMNS = 4096
"""The most outputs of a product that are compared: a part of the LM head's."""
ROUNDINGS = 8
"""The largest accepted error beyond half a unit of a sum, in float32 roundings of the sum."""


@dataclass(frozen=True)
class Product:
    """A MatMul of codes. rows: the name of its rows' codes (uint8). result: that of its result.

    codes [K,N]: the weights' codes, of up to MAX_COLUMNS outputs. zero: the rows' zero point. unit
    [N]: the value of 1 in a sum of products of codes.
    """

    rows: str
    result: str
    codes: Array
    zero: int
    unit: Array

    def is_exact(self, rows: Array, result: Array) -> bool:
        """rows [...,K], result [...,N]: what the session computed."""
        # Exact below 2**53
        sums = (rows.astype(np.float64) - self.zero) @ self.codes.astype(np.float64)
        error = np.abs(result[..., : sums.shape[-1]] / self.unit.astype(np.float64) - sums)
        return bool((error <= 0.5 + ROUNDINGS * np.finfo(np.float32).eps * np.abs(sums)).all())


def check_sums(directory: Path, manifest: Manifest, feed: Mapping[str, Array]) -> int:
    """Compare the 8-bit products in one pass of a CPU trunk with their exact sums.

    feed: the inputs of the pass. Returns the number of products, 0 if the bundle has no such trunk.
    Raises PassError if a sum differs.
    """
    fitting = [
        each.file for each in manifest.derived if each.device == "cpu" and each.lookahead_rows
    ]
    if not has_static_activations(manifest) or not fitting:
        return 0
    model = ir.load(directory / fitting[0])
    products = expose_products(model.graph)
    path = directory / f"{FILE_PREFIX}{fitting[0]}"
    try:
        ir.save(model, path)  # The weights stay in the trunk's file.
        session = open_session(path, "cpu", unsigned=needs_unsigned_weights(directory, manifest))
        names = [value.name for value in session.get_outputs()]
        inputs = {value.name: feed[value.name] for value in session.get_inputs()}
        found = dict(zip(names, session.run(names, inputs), strict=True))
    finally:
        path.unlink(missing_ok=True)
    wrong = [
        each.result for each in products if not each.is_exact(found[each.rows], found[each.result])
    ]
    if wrong:
        raise PassError(
            f"{fitting[0]}: {len(wrong)} of {len(products)} 8-bit products have wrong sums on this "
            f"CPU, first {wrong[0]}; please report it, and export with --weights int8"
        )
    return len(products)


def expose_products(graph: ir.Graph) -> list[Product]:
    """Return the products of codes whose weights have a scale for each output. Their rows' codes
    and their results become outputs of the graph."""
    found = []
    for node in [node for node in graph if node.op_type == "MatMul"]:
        rows, weights = (_dequantize(value) for value in node.inputs)
        if rows is None or weights is None or weights.attributes.get_int("block_size"):
            continue
        for value in (rows.inputs[0], node.outputs[0]):
            if value is not None and not value.is_graph_output():
                graph.outputs.append(value)
        codes, scales = (_constant(value)[..., :MAX_COLUMNS] for value in weights.inputs[:2])
        scale, zero = (_constant(value) for value in rows.inputs[1:])
        names = [
            str(value.name) for value in (rows.inputs[0], node.outputs[0]) if value is not None
        ]
        found.append(Product(names[0], names[1], codes, int(zero), scale * scales))
    return found


def _dequantize(value: ir.Value | None) -> ir.Node | None:
    """Return the DequantizeLinear whose output this is."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == "DequantizeLinear" else None


def _constant(value: ir.Value | None) -> Array:
    assert value is not None and value.const_value is not None
    return value.const_value.numpy()
