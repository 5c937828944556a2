"""Finds how ONNX Runtime's CPU kernels round on this machine: runs tiny graphs, for about 6 ms.

ONNX Runtime has different kernels for different instruction sets. Their results differ in three
ways that decide which graphs, paddings and caches can be used:

- Without 8-bit dot products (VNNI, AMX), a matrix product of uint8 and int8 codes adds pairs of
  products in 16 bits. A sum that does not fit 16 bits becomes the nearest number that does.
- A product with weights in blocks (MatMulNBits) may add in another order for a single row than for
  several rows. Then a token's values depend on the number of rows in its pass.
- Without AVX2, a softmax adds the elements after the last whole vector in another order. Then its
  results depend on how many masked entries follow.

The name of the CPU does not tell which kernels run: that depends on ONNX Runtime's build too, and
an emulated CPU has the name of another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from pass_runtime.backends.ort.external_data import encode_field, encode_varint
from pass_runtime.bundle.manifest import Manifest

ROW_COUNTS = (1, 2, 3, 5, 9)
"""Products of this many rows are compared with those of the same rows among MAX_ROWS."""
MAX_ROWS = 16
BLOCKS, OUTPUTS = 4, 64
"""The sizes of the weights of a tiny product: blocks of inputs, and outputs."""
ACCURACY_LEVEL = 4
"""The value of MatMulNBits's attribute `accuracy_level` with which rows are rounded to 8 bits."""


class Kernels(NamedTuple):
    """How kernels round. exact_sums: whether products of uint8 and int8 codes are summed exactly.
    least_rows: with this many rows or more, a row's results do not depend on the number of rows;
    None if they always depend on it. equal_softmax: whether a softmax does not depend on how many
    masked entries follow the others."""

    exact_sums: bool
    least_rows: int | None
    equal_softmax: bool

    def __str__(self) -> str:
        sums = "exact" if self.exact_sums else "saturating"
        rows = "never equal" if self.least_rows is None else f"equal from {self.least_rows} on"
        softmax = "equal" if self.equal_softmax else "not equal"
        return f"8-bit sums {sums}, numbers of rows {rows}, softmax with masked entries {softmax}"


EXACT = Kernels(exact_sums=True, least_rows=1, equal_softmax=True)
"""The kernels of `open_session(exact=True)`, which computes products in float32."""


def find_kernels(manifest: Manifest) -> Kernels:
    """Find how the CPU kernels that run the bundle's graphs round on this machine."""
    least: int | None = 1
    for bits, block_size in block_formats(manifest):
        rows = least_rows(bits, block_size)
        least = None if rows is None or least is None else max(least, rows)
    return Kernels(sums_are_exact(), least, softmax_is_equal())


def block_formats(manifest: Manifest) -> Collection[tuple[int, int]]:
    """Return (bits, block size) of the bundle's weights that have blocks, without repetitions."""
    info = manifest.model.quantization
    if info is None:  # Older bundles do not list their formats; these are all that they can have.
        return () if manifest.model.weights == "full" else {(4, 32), (8, 32)}
    formats = set[tuple[int, int]]()
    for scheme in (info.grid, info.lm_head, *info.layers.values()):
        if scheme is not None and scheme.block_size is not None and scheme.numbers != "fp8":
            formats.add((int(scheme.numbers.removeprefix("int")), scheme.block_size))
            # To add an offset, graphs sum a block's inputs, by a product with 4-bit codes.
            if scheme.offsets:
                formats.add((4, scheme.block_size))
    return formats


@cache
def sums_are_exact() -> bool:
    """Find `Kernels.exact_sums`, once a process."""
    # 255 * 127, twice, does not fit 16 bits.
    rows, weights = np.full((2, 64), 255, np.uint8), np.full((64, 16), 127, np.int8)
    session = _open("MatMulInteger", "", {}, (UINT8, 64), INT32, weights=weights)
    return bool((_run(session, rows) == rows.astype(np.int64) @ weights).all())


@cache
def least_rows(bits: int, block_size: int) -> int | None:
    """Find `Kernels.least_rows` for weights with these bits and blocks, once a process."""
    random, inputs = np.random.default_rng(0), BLOCKS * block_size
    codes = random.integers(0, 256, (OUTPUTS, BLOCKS, block_size * bits // 8), np.uint8)
    scales = random.uniform(0.001, 0.02, (OUTPUTS, BLOCKS)).astype(np.float32)
    sizes = {
        "K": inputs,
        "N": OUTPUTS,
        "bits": bits,
        "block_size": block_size,
        "accuracy_level": ACCURACY_LEVEL,
    }
    session = _open(
        "MatMulNBits", "com.microsoft", sizes, (FLOAT, inputs), FLOAT, codes=codes, scales=scales
    )
    rows = random.standard_normal((MAX_ROWS, inputs)).astype(np.float32)
    all_results = _run(session, rows)
    differing = [
        n for n in ROW_COUNTS if not np.array_equal(_run(session, rows[:n]), all_results[:n])
    ]
    # 1 if no results differ, 2 if only those of a single row do, and otherwise None.
    return {(): 1, (1,): 2}.get(tuple(differing))


@cache
def softmax_is_equal() -> bool:
    """Find `Kernels.equal_softmax`, once a process."""
    session = _open("Softmax", "", {}, (FLOAT, None), FLOAT)
    # Random scores of different sizes in many rows: another order of addition changes some sums.
    scores = 3 * np.random.default_rng(0).standard_normal((MAX_ROWS, 32)).astype(np.float32)
    for count in range(1, 8):  # fewer entries than fill a vector of 8
        masked = np.where(np.arange(32) < count, scores, np.float32(-np.inf))
        if not np.array_equal(_run(session, scores[:, :count]), _run(session, masked)[:, :count]):
            return False
    return True


FLOAT, UINT8, INT8, INT32 = 1, 2, 3, 6
"""Element types of onnx.proto."""
ELEMENT_TYPES = {"float32": FLOAT, "uint8": UINT8, "int8": INT8}
IR_VERSION, OPSET = 10, 21


def _open(
    op: str,
    domain: str,
    sizes: Mapping[str, int],
    rows: tuple[int, int | None],
    output: int,
    **weights: npt.NDArray[Any],
) -> ort.InferenceSession:
    """Open a session of a graph with one node `op`, which reads the graph's input and `weights`,
    and has the integer attributes `sizes`.

    rows: the element type and the number of columns of the graph's input [M,columns]; None is any
    number. output: the element type of the graph's output [M,N]. The graph is encoded here, because
    the runtime needs the package onnx for nothing else; numbers of fields are from onnx.proto.
    """
    attributes = [
        _text(1, name) + _number(3, size) + _number(20, 2) for name, size in sizes.items()
    ]
    node = [_text(1, name) for name in ("rows", *weights)] + [
        _text(2, "result"),
        _text(4, op),
        _text(7, domain),
    ]
    tensors = [
        b"".join(_number(1, size) for size in array.shape)
        + _number(2, ELEMENT_TYPES[array.dtype.name])
        + _text(8, name)
        + encode_field(9, array.tobytes())
        for name, array in weights.items()
    ]
    graph = [
        encode_field(1, b"".join([*node, *(encode_field(5, each) for each in attributes)])),
        _text(2, "probe"),
        *(encode_field(5, each) for each in tensors),
        encode_field(11, _value("rows", *rows)),
        encode_field(12, _value("result", output)),
    ]
    opsets = [_text(1, "com.microsoft") + _number(2, 1), _number(2, OPSET)]
    model = _number(1, IR_VERSION) + b"".join(encode_field(8, each) for each in opsets)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # errors only
    content = model + encode_field(7, b"".join(graph))
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _value(name: str, element_type: int, columns: int | None = None) -> bytes:
    """Encode a graph's input or output [M,columns] (ValueInfoProto); None is any number."""
    sizes = [_text(2, "M"), _text(2, "N") if columns is None else _number(1, columns)]
    shape = b"".join(encode_field(1, size) for size in sizes)
    return _text(1, name) + encode_field(
        2, encode_field(1, _number(1, element_type) + encode_field(2, shape))
    )


def _text(number: int, text: str) -> bytes:
    return encode_field(number, text.encode())


def _number(number: int, value: int) -> bytes:
    return encode_varint(number << 3) + encode_varint(value)


def _run(session: ort.InferenceSession, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    result: npt.NDArray[Any] = session.run(None, {"rows": rows})[0]
    return result
