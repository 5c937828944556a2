from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from conftest import VOCAB_SIZE
from pass_runtime.bundle.tensors import LOOKAHEAD_ROWS
from pass_runtime.bundle.window import Window


def trunk_feed(
    session: ort.InferenceSession,
    window: Window,
    tokens: np.ndarray,
    lengths: Sequence[int],
    past: Sequence[np.ndarray],
) -> dict[str, np.ndarray]:
    """tokens: [B,Q or more]; those of look-ahead rows are replaced. past: [B,KVH,C,D] each."""
    ids = tokens[:, : window.width].copy()
    ids[:, window.width - len(window.lookahead_rows) :] = window.lookahead_ids(VOCAB_SIZE)
    feed = {
        "input_ids": ids,
        "row_position": window.row_position,
        "window_mask": window.window_mask,
        "length": np.array(lengths),
        "logit_rows": np.arange(window.width),
    }
    names = [value.name for value in session.get_inputs()]
    if LOOKAHEAD_ROWS in names:
        feed[LOOKAHEAD_ROWS] = window.lookahead_rows
    caches = [name for name in names if name not in feed]
    return feed | dict(zip(caches, past, strict=True))
