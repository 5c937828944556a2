"""Builds tail.<window>.<sampler>.onnx for the exact-match rule: it accepts drafts that equal the
samples.

A draft without a look-ahead row gets the id V, which no sample equals. Nodes that read
`input_ids` and `length` come before those that write `next_ids` and `next_length`, which may
overwrite them.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.builder import (
    ChainNoise,
    TailBuilder,
    WindowNoise,
    count_leading,
    slice_rows,
)
from pass_exporter.tails.head_drafts import CandidateSubset, Choices, Choose, head_drafts
from pass_runtime.bundle.head import HeadArrays
from pass_runtime.bundle.sampling import Sampler
from pass_runtime.bundle.window import Window


def build_tail(
    window: Window, sampler: Sampler, vocab_size: int, head: HeadArrays | None = None
) -> ir.Model:
    """head: makes the drafts, or None."""
    tail = TailBuilder(f"tail.{window.tail}.{sampler}", window, sampler, vocab_size, head)
    op = tail.op
    # Drawn after the new root: accepted drafts choose the rows of a fused window, and a draft head
    # reads the root.
    drafts_later = window.is_fused or (head is not None and window.next.drafts > 0)
    rows = window.drafts + 1 if drafts_later else window.width
    logits = slice_rows(op, tail.logits, 0, rows) if drafts_later else tail.logits
    random: WindowNoise | None = None
    if sampler == "greedy":
        samples = op("ArgMax", logits, axis=-1, keepdims=0)  # [B,rows]
    else:
        # If all drafts are accepted, the next drafts come after all `rows`.
        positions = rows + window.next.drafts if drafts_later else rows
        random = WindowNoise.after(tail, tail.length, positions, "noise_offsets")
        samples = random.sample(logits, window.row_position[:rows].tolist())
    emitted = (
        samples if rows == window.max_emitted else slice_rows(op, samples, 0, window.max_emitted)
    )
    accepted = _accepted(tail, emitted)  # [B,1]
    count, next_length = tail.advance(accepted)
    root = op("GatherElements", emitted, accepted, axis=1) if window.drafts else emitted
    drafts = None
    if drafts_later:
        drafts = _later_drafts(tail, accepted, root, random)
    elif window.next.drafts:
        drafts = slice_rows(op, samples, 1, 1 + window.next.drafts)
    return op.model(
        {
            "emitted": (emitted, np.int64, ["batch", window.max_emitted]),
            "count": (count, np.int64, ["batch"]),
            "next_ids": (tail.next_window(root, drafts), np.int64, ["batch", tail.next_width]),
            "next_length": (next_length, np.int64, ["batch"]),
        }
    )


def _accepted(tail: TailBuilder, emitted: ir.Value) -> ir.Value:
    op, window = tail.op, tail.window
    if window.drafts == 0:
        return op("Mul", emitted, op.const(0))
    drafts = slice_rows(op, tail.input_ids(), 1, 1 + window.drafts)
    equal = op("Equal", slice_rows(op, emitted, 0, window.drafts), drafts)
    return count_leading(op, equal, window.drafts)


def _later_drafts(
    tail: TailBuilder, accepted: ir.Value, root: ir.Value, random: WindowNoise | None
) -> ir.Value:
    """Return the drafts [B,D'], or V, of the rows after the last accepted draft."""
    op, sampler, count = tail.op, tail.sampler, tail.window.next.drafts
    rows, logits = tail.group_rows(accepted)
    chain = None if random is None else ChainNoise(random, accepted, count)
    if tail.head is not None:
        drafts = head_drafts(tail, logits, rows, root, _choice(tail, chain))
    elif chain is None:
        drafts = op("ArgMax", logits, axis=-1, keepdims=0)
    else:
        drafts = sampler.draw(sampler.weights(logits, count), chain.of_all_blocks(), count)
    return op("Where", op("Equal", rows, op.const(0)), op.const(tail.vocab_size), drafts)


def _choice(tail: TailBuilder, chain: ChainNoise | None) -> Choose:
    op, sampler = tail.op, tail.sampler

    def choose(choices: Choices, scores: ir.Value, j: int) -> ir.Value:
        if chain is None:
            return choices.best(j, scores)
        if isinstance(choices, CandidateSubset):
            return choices.token_ids(
                j, sampler.draw_candidate(scores, chain.of_candidates(choices.blocks)[j])
            )
        return op(
            "Unsqueeze", sampler.draw(sampler.weights(scores, 1), chain.of_row(j), 1), op.const([2])
        )

    return choose
