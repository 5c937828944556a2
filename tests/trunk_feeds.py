"""The inputs of a trunk for one window, for tests that run a trunk's graph without a session."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from conftest import VOCAB_SIZE
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.tensors import LOOKAHEAD_ROWS


def trunk_feed(
    session: ort.InferenceSession,
    plan: Plan,
    tokens: np.ndarray,
    lengths: Sequence[int],
    past: Sequence[np.ndarray],
) -> dict[str, np.ndarray]:
    """Return the inputs of the trunk by name, for a window of `plan` in every slot.

    All rows get logits. tokens: [B,Q or more] token ids, of which the first Q are the window; those
    of look-ahead rows are replaced. lengths: [B] numbers of cache entries before the window. past:
    the KV cache, [B,KVH,C,D] for each of the trunk's inputs that belong to it.
    """
    ids = tokens[:, : plan.width].copy()
    ids[:, plan.width - len(plan.lookahead_rows) :] = plan.lookahead_ids(VOCAB_SIZE)
    feed = {
        "input_ids": ids,
        "row_position": plan.row_position,
        "window_mask": plan.window_mask,
        "length": np.array(lengths),
        "logit_rows": np.arange(plan.width),
    }
    names = [value.name for value in session.get_inputs()]
    if LOOKAHEAD_ROWS in names:
        feed[LOOKAHEAD_ROWS] = plan.lookahead_rows
    caches = [name for name in names if name not in feed]
    return feed | dict(zip(caches, past, strict=True))
