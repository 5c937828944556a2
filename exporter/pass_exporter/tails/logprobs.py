"""Builds tail.logprobs.onnx: log-probabilities of emitted tokens and of the most likely tokens.

    logits         [B,R,V] float32   the trunk's logits, one row per window row
    emitted        [B,E] int64       the tail's output: token j was drawn from row j
 -> chosen_logprob [B,E] float32     natural logarithms of the emitted tokens' probabilities
    top_ids        [B,E,K] int64     the K = min(20, V) most likely tokens, most likely first
    top_logprobs   [B,E,K] float32   natural logarithms of their probabilities

Probabilities are those before temperature and truncation. As in `emitted`, only the first `count`
entries of a slot are valid. `pass_exporter.tails.definitions.token_logprobs` is the definition.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle.request_fields import MAX_LOGPROBS


def build_logprobs(vocab_size: int) -> ir.Model:
    """Build the graph for every plan but trees, which no request with log-probabilities uses."""
    op, k = GraphTape("tail.logprobs"), min(MAX_LOGPROBS, vocab_size)
    logits = op.input("logits", np.float32, ["batch", "width", vocab_size])
    emitted = op.input("emitted", np.int64, ["batch", "max_emitted"])
    count = op("Shape", emitted, start=1, end=2)
    rows = op("Slice", logits, op.const([0]), count, op.const([1]))
    values, ids = op.pair("TopK", rows, op.const([k]), axis=-1)  # [B,E,K]
    largest = op("Slice", values, op.const([0]), op.const([1]), op.const([2]))
    mass = op("ReduceSum", op("Exp", op("Sub", rows, largest)), op.const([2]), keepdims=1)
    total = op("Add", largest, op("Log", mass))  # [B,E,1]: log(sum(exp(logits)))
    # After `count` tokens, `emitted` may contain V, the id of a missing draft.
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
