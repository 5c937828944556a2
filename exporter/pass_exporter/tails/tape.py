"""onnx_ir's tape, with which code for graphs reads like arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from pass_exporter.trunk.graph import OPSET

Shape = Sequence[str | int]
Attribute = int | float | str | list[int]
Output = tuple[ir.Value, npt.DTypeLike, Shape]
"""A graph's output: its value, dtype and shape."""


class GraphTape:
    """Equal nodes are recorded once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._tape = ir.tape.Tape()
        self._inputs: dict[str, ir.Value] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._nodes: dict[tuple[object, ...], Sequence[ir.Value]] = {}

    def input(self, name: str, dtype: npt.DTypeLike, shape: Shape) -> ir.Value:
        """The first call adds it."""
        if name not in self._inputs:
            self._inputs[name] = ir.val(
                name, dtype=ir.DataType.from_numpy(np.dtype(dtype)), shape=tuple(shape)
            )
        return self._inputs[name]

    def const(
        self, value: npt.ArrayLike, dtype: npt.DTypeLike = np.int64, name: str | None = None
    ) -> ir.Value:
        """Equal constants share an initializer."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = name or f"const_{len(self._constants)}"
            self._constants[key] = self._tape.initializer(ir.tensor(array, name=name), name)
        return self._constants[key]

    def per_request(self, name: str, dtype: npt.DTypeLike = np.float32) -> ir.Value:
        """An input [B], one value per request, as [B,1,1]."""
        return self("Unsqueeze", self.input(name, dtype, ["batch"]), self.const([1, 2]))

    def __call__(self, op: str, *inputs: ir.Value | None, **attributes: Attribute) -> ir.Value:
        return self._outputs(op, inputs, attributes, 1)[0]

    def pair(
        self, op: str, *inputs: ir.Value, **attributes: Attribute
    ) -> tuple[ir.Value, ir.Value]:
        first, second = self._outputs(op, inputs, attributes, 2)
        return first, second

    def split(self, value: ir.Value, sizes: Sequence[int], axis: int) -> Sequence[ir.Value]:
        """Split `value` along `axis` into parts of these sizes."""
        if len(sizes) == 1:
            return [value]
        return self._outputs("Split", (value, self.const(sizes)), {"axis": axis}, len(sizes))

    def _outputs(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Attribute],
        count: int,
    ) -> Sequence[ir.Value]:
        key = (op, *map(id, inputs), repr(sorted(attributes.items())), count)
        if key not in self._nodes:
            self._nodes[key] = self._tape.op_multi_out(op, inputs, attributes, num_outputs=count)
        return self._nodes[key]

    def model(self, outputs: Mapping[str, Output]) -> ir.Model:
        results = []
        for name, (value, dtype, shape) in outputs.items():
            value.name, value.shape = name, ir.Shape(tuple(shape))
            value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
            results.append(value)
        graph = ir.Graph(
            list(self._inputs.values()),
            results,
            nodes=self._tape.nodes,
            initializers=[value for value in self._tape.initializers if value.uses()],
            opset_imports={"": OPSET},
            name=self.name,
        )
        return ir.Model(graph, ir_version=11)
