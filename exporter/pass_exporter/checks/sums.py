"""Checks that the 8-bit products of a trunk are summed exactly on this CPU, by one pass.

Some CPUs' instructions for 8-bit products saturate. The checks against torch cannot find this:
their limits are wider than its effect, and they run large models without the fused products that
users run.
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
MAX_COMPARED_COLUMNS = 4096
"""The largest number of a product's columns that are compared. Only the LM head has more."""
MAX_ROUNDINGS = 8
"""The largest accepted error of a sum is 0.5, because sums are integers, plus this many float32
roundings of the sum, because the result is scaled in float32."""


@dataclass(frozen=True)
class Product:
    """A MatMul of rows and weights that are both 8-bit codes.

    rows, result: the names of the tensors with the rows' codes (uint8) and the product.
    zero_point: the rows' zero point.
    codes [K,N]: the first columns of the weights' codes, at most MAX_COMPARED_COLUMNS.
    scales [N]: the value in `result` that stands for 1 in the sum of the codes' products.
    """

    rows: str
    result: str
    codes: Array
    zero_point: int
    scales: Array

    def is_exact(self, rows: Array, result: Array) -> bool:
        """Whether `result` [...,N] or more columns is the product of the weights and `rows`
        [...,K]."""
        # float64 represents the sums exactly, because they are below 2**53.
        sums = (rows.astype(np.float64) - self.zero_point) @ self.codes.astype(np.float64)
        error = np.abs(result[..., : sums.shape[-1]] / self.scales.astype(np.float64) - sums)
        return bool((error <= 0.5 + MAX_ROUNDINGS * np.finfo(np.float32).eps * np.abs(sums)).all())


def check_sums(directory: Path, manifest: Manifest, feed: Mapping[str, Array]) -> int:
    """Compare the 8-bit products in one pass of a CPU trunk with their exact sums.

    feed: the inputs of the pass. Return the number of products; 0 if the bundle has no trunk with
    8-bit activations for the CPU. Raises PassError if a product is not exact.
    """
    files = [
        trunk.file for trunk in manifest.derived if trunk.device == "cpu" and trunk.lookahead_rows
    ]
    if not has_static_activations(manifest) or not files:
        return 0
    model = ir.load(directory / files[0])
    products = expose_products(model.graph)
    path = directory / f"{FILE_PREFIX}{files[0]}"
    try:
        ir.save(model, path)  # The weights stay in the trunk's file.
        session = open_session(path, "cpu", unsigned=needs_unsigned_weights(directory, manifest))
        names = [value.name for value in session.get_outputs()]
        inputs = {value.name: feed[value.name] for value in session.get_inputs()}
        arrays = dict(zip(names, session.run(names, inputs), strict=True))
    finally:
        path.unlink(missing_ok=True)
    wrong = [
        product.result
        for product in products
        if not product.is_exact(arrays[product.rows], arrays[product.result])
    ]
    if wrong:
        raise PassError(
            f"{files[0]}: {len(wrong)} of {len(products)} 8-bit products have wrong sums on this "
            f"CPU, first {wrong[0]}; please report it, and export with --weights int8"
        )
    return len(products)


def expose_products(graph: ir.Graph) -> list[Product]:
    """Return the products of codes whose weights have one scale for each column. The codes of their
    rows, and their results, become outputs of the graph."""
    products = []
    for node in [node for node in graph if node.op_type == "MatMul"]:
        rows, weights = (_dequantize(value) for value in node.inputs)
        if rows is None or weights is None or weights.attributes.get_int("block_size"):
            continue
        row_codes, result = rows.inputs[0], node.outputs[0]
        assert row_codes is not None
        for value in (row_codes, result):
            if not value.is_graph_output():
                graph.outputs.append(value)
        codes, weight_scales = (
            _constant(value)[..., :MAX_COMPARED_COLUMNS] for value in weights.inputs[:2]
        )
        row_scale, zero_point = (_constant(value) for value in rows.inputs[1:])
        names = str(row_codes.name), str(result.name)
        products.append(Product(*names, codes, int(zero_point), row_scale * weight_scales))
    return products


def _dequantize(value: ir.Value | None) -> ir.Node | None:
    """Return the DequantizeLinear whose output `value` is, or None."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == "DequantizeLinear" else None


def _constant(value: ir.Value | None) -> Array:
    assert value is not None and value.const_value is not None
    return value.const_value.numpy()
