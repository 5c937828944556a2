"""Builds tail.logprobs.onnx and tail.processors.onnx, each for all windows and samplers
(docs/bundle.md)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle.sampling import FORBIDDEN_BIAS, MAX_LOGPROBS

F32 = np.float32
SLICE_END = (1 << 31) - 1


def build_logprobs(vocab_size: int) -> ir.Model:
    """For emitted and the likeliest tokens, before temperature and truncation."""
    op, k = GraphTape("tail.logprobs"), min(MAX_LOGPROBS, vocab_size)
    logits = op.input("logits", np.float32, ["batch", "width", vocab_size])
    emitted = op.input("emitted", np.int64, ["batch", "max_emitted"])
    count = op("Shape", emitted, start=1, end=2)
    rows = op("Slice", logits, op.const([0]), count, op.const([1]))
    values, ids = op.pair("TopK", rows, op.const([k]), axis=-1)  # [B,E,K]
    largest = op("Slice", values, op.const([0]), op.const([1]), op.const([2]))
    mass = op("ReduceSum", op("Exp", op("Sub", rows, largest)), op.const([2]), keepdims=1)
    total = op("Add", largest, op("Log", mass))  # [B,E,1]: log(sum(exp(logits)))
    # After `count` tokens, `emitted` may contain V: no draft.
    tokens = op("Unsqueeze", op("Min", emitted, op.const(vocab_size - 1)), op.const([2]))
    chosen = op("Sub", op("GatherElements", rows, tokens, axis=2), total)
    return op.model(
        {
            "chosen_logprob": (
                op("Squeeze", chosen, op.const([2])),
                np.float32,
                ["batch", "max_emitted"],
            ),
            "top_ids": (ids, np.int64, ["batch", "max_emitted", k]),
            "top_logprobs": (op("Sub", values, total), np.float32, ["batch", "max_emitted", k]),
        }
    )


def build_processors(vocab_size: int) -> ir.Model:
    """Constraints, penalties and biases of rows whose samples may be emitted. A forbidden draft
    of a look-ahead row is rejected later."""
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
    """[B,P,V]: 0 where the bit in allowed [B,P,V/8] is set, else FORBIDDEN_BIAS."""
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
    table = op.const(np.where(bits, 0, FORBIDDEN_BIAS), F32)  # 8 values for each of 256 numbers
    mask = op("Reshape", op("Gather", table, allowed, axis=0), op.const([0, 0, -1]))
    if vocab_size % 8 == 0:
        return mask
    return op("Slice", mask, op.const([0]), op.const([vocab_size]), op.const([2]))
