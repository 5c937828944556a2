"""The inputs of a trunk for one window, as tests of graphs run it without a session."""

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
    """Return the inputs of the trunk for a window of `plan` in every slot. All rows get logits.

    tokens: [B,Q or more] the tokens of the window; its look-ahead rows are filled in. lengths: [B]
    the cache entries before the window. past: the cache, [B,KVH,C,D] for every input of it.
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
