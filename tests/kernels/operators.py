"""Runs single operators of the CPU kernels, and makes their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import helper

from pass_exporter.derived.packing import BLOCK, pack
from pass_runtime.backends.ort.session import library

DOMAIN = "pass.cpu"
NONE, SILU, GELU_TANH = 0, 1, 2
BITS = (4, 5, 8)
EPSILON = 2.0**-24
LAYOUTS = [(bits, symmetric) for bits in BITS for symmetric in (False, True)]

Array = np.ndarray[Any, Any]


def run(
    op_type: str, *inputs: Array | None, outputs: int = 1, threads: int = 1, **attributes: float
) -> list[Array]:
    session = open_operator(op_type, inputs, outputs, threads, **attributes)
    return session.run(None, feed_of(inputs))


def open_operator(
    op_type: str,
    inputs: Sequence[Array | None],
    outputs: int = 1,
    threads: int = 1,
    **attributes: float,
) -> ort.InferenceSession:
    """Inputs are x0, x1 .., outputs y0, y1 .."""
    dtypes = tuple(None if each is None else each.dtype for each in inputs)
    return _open(op_type, dtypes, outputs, threads, tuple(attributes.items()))


def feed_of(inputs: Sequence[Array | None]) -> dict[str, Array]:
    return {f"x{i}": each for i, each in enumerate(inputs) if each is not None}


@lru_cache(64)
def _open(
    op_type: str,
    dtypes: tuple[np.dtype[Any] | None, ...],
    outputs: int,
    threads: int,
    attributes: tuple[tuple[str, float], ...],
) -> ort.InferenceSession:
    values = {f"x{i}": dtype for i, dtype in enumerate(dtypes) if dtype is not None}
    results = [f"y{i}" for i in range(outputs)]
    names = [f"x{i}" if f"x{i}" in values else "" for i in range(len(dtypes))]
    node = helper.make_node(op_type, names, results, domain=DOMAIN, **dict(attributes))
    graph = helper.make_graph(
        [node],
        op_type,
        [_value(name, dtype) for name, dtype in values.items()],
        [_value(name, np.dtype(np.float32)) for name in results],
    )
    imports = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # errors are raised
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.register_custom_ops_library(str(library()))
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _value(name: str, dtype: np.dtype[Any]) -> Any:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), None)


@dataclass(frozen=True)
class Weight:
    """A weight [out,in], code * scale + offset. scales, offsets: [out,blocks] float16; symmetric:
    offsets follow from scales, and are not packed."""

    codes: Array
    bits: int
    scales: Array
    offsets: Array
    symmetric: bool = False

    @property
    def layout(self) -> dict[str, int]:
        return {"bits": self.bits, "symmetric": int(self.symmetric)}

    @property
    def inputs(self) -> int:
        return int(self.codes.shape[1])

    @property
    def columns(self) -> int:
        return len(self.codes)

    @property
    def packed(self) -> Array:
        """[groups,blocks,bytes]"""
        offsets = None if self.symmetric else self.offsets
        return pack(self.codes, self.bits, self.scales, offsets)

    @property
    def values(self) -> Array:
        """[out,in] float64, exact"""
        scales, offsets = (
            np.repeat(each.astype(np.float64), BLOCK, 1)[:, : self.inputs]
            for each in (self.scales, self.offsets)
        )
        return self.codes * scales + offsets


# Random numbers are made of integers alone, because a normal distribution's last bits depend on the
# CPU, and outputs.py compares CPUs.


def random_weight(
    rng: np.random.Generator, columns: int, inputs: int, bits: int, symmetric: bool = False
) -> Weight:
    shape = (columns, -(-inputs // BLOCK))
    codes = rng.integers(0, 2**bits, (columns, inputs), np.uint8)
    scales = (rng.integers(1, 1024, shape) / 2.0 ** (11 + bits)).astype(np.float16)
    offsets = (rng.integers(-1024, 1024, shape) / 2.0**11).astype(np.float16)
    if symmetric:
        offsets = scales * np.float16(-(2 ** (bits - 1)))
    return Weight(codes, bits, scales, offsets, symmetric)


def random_floats(rng: np.random.Generator, *shape: int) -> Array:
    """A bell curve with deviation 1."""
    return (rng.integers(-4096, 4097, (12, *shape)).sum(0) / 8192).astype(np.float32)


def gated(activation: int, gate: Array, up: Array) -> tuple[Array, Array]:
    """Return the result and its largest error in float32."""
    exponent = gate
    if activation == GELU_TANH:
        exponent = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    with np.errstate(over="ignore"):
        result = gate / (1 + np.exp(-exponent)) * up
    relative = 8 * EPSILON * (2 + np.abs(exponent).clip(max=88))
    return result, relative * np.abs(result) + 2 * np.exp(-88) * np.abs(gate * up)
