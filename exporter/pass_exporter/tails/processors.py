"""Builds tail.processors.onnx: applies constraints, penalties and biases to logits, before a tail.

    logits            [B,R,V] float32     the trunk's logits, one row per window row
    allowed           [B,P,V/8] int32     a bit for each token, 8 in each number: whether the row
                                          may draw the token (V/8 is rounded up)
    touched           [B,T] int64         the tokens that have a bias or a penalty; an id may be
                                          repeated with equal values
    bias              [B,T] float32       is added to the logits of these tokens
    factor            [B,P,T] float32     then divides positive logits, and multiplies negative ones
    penalty           [B,P,T] float32     then is subtracted
 -> processed_logits  [B,R,V] float32     the first P rows processed, and the other rows unchanged

P is the number of rows whose samples may be emitted: the root and the drafts. Look-ahead rows are
not processed, because the tokens before them are not known when the pass begins. A draft that a
constraint forbids is rejected when it is verified.
`pass_exporter.tails.definitions.process_logits` is the definition.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle.sampling import FORBIDDEN_BIAS

F32 = np.float32
SLICE_END = (1 << 31) - 1
"""The end of a Slice of all remaining rows: more than any number of rows."""


def build_processors(vocab_size: int) -> ir.Model:
    """Build the graph, which serves the windows of every plan and every sampler."""
    op = GraphTape("tail.processors")
    logits = op.input("logits", np.float32, ["batch", "width", vocab_size])
    allowed = op.input("allowed", np.int32, ["batch", "processed_rows", -(-vocab_size // 8)])
    factor = op.input("factor", np.float32, ["batch", "processed_rows", "touched"])
    row_count = op("Shape", factor, start=1, end=2)  # [1]: P
    processed = op("Slice", logits, op.const([0]), row_count, op.const([1]))  # [B,P,V]
    processed = op("Add", _penalized(op, processed, factor), _mask(op, allowed, vocab_size))
    others = op("Slice", logits, row_count, op.const([SLICE_END]), op.const([1]))
    output = op("Concat", processed, others, axis=1)
    return op.model({"processed_logits": (output, np.float32, ["batch", "width", vocab_size])})


def _penalized(op: GraphTape, rows: ir.Value, factor: ir.Value) -> ir.Value:
    """Return rows [B,P,V] with biases and penalties applied to the logits of `touched` tokens."""
    sizes = ["batch", "touched"]
    touched = op("Unsqueeze", op.input("touched", np.int64, sizes), op.const([1]))
    ids = op("Expand", touched, op("Shape", factor))  # [B,P,T]
    bias = op("Unsqueeze", op.input("bias", np.float32, sizes), op.const([1]))
    values = op("Add", op("GatherElements", rows, ids, axis=2), bias)
    is_positive = op("Greater", values, op.const(0, F32))
    values = op("Where", is_positive, op("Div", values, factor), op("Mul", values, factor))
    values = op(
        "Sub", values, op.input("penalty", np.float32, ["batch", "processed_rows", "touched"])
    )
    return op("ScatterElements", rows, ids, values, axis=2)


def _mask(op: GraphTape, allowed: ir.Value, vocab_size: int) -> ir.Value:
    """Return [B,P,V]: 0 for a token whose bit in allowed [B,P,V/8] is set, else FORBIDDEN_BIAS."""
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
    table = op.const(np.where(bits, 0, FORBIDDEN_BIAS), F32)  # 8 values for each of 256 numbers
    mask = op("Reshape", op("Gather", table, allowed, axis=0), op.const([0, 0, -1]))
    if vocab_size % 8 == 0:
        return mask
    return op("Slice", mask, op.const([0]), op.const([vocab_size]), op.const([2]))
