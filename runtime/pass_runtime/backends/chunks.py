"""How wide the chunks may be in which a GPU reads prompts.

A chunk reads all weights once, so few wide ones are faster than many narrow ones; a pass of 256 rows leaves a large GPU
half idle. But a wide one needs memory for what its rows compute, which stays reserved for as long as the engine is
there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pass_runtime.backends.memory import item_size
from pass_runtime.bundle.manifest import ModelInfo

WIDE = (2048, 1024)
MOST_BYTES = 1 << 30
"""What the rows of a chunk of WIDE may take."""


def activation_bytes(model: ModelInfo, rows: int, columns: int, logit_rows: int = 1, batch: int = 1) -> int:
    """About the bytes that a pass needs beside weights and cache: for the logits, a layer's rows (hidden states, and an
    MLP about four times as wide) and attention's scores, as if no kernel were fused."""
    element = item_size(model.dtype)
    logits = 2 * 4 * batch * logit_rows * model.vocab_size
    layer = batch * rows * (4 * model.hidden_size + 3 * 4 * model.hidden_size) * element
    scores = batch * rows * model.heads * columns * (element + 1)
    return logits + layer + scores


def wide_chunks(model: ModelInfo, capacities: Sequence[int]) -> Mapping[int, int]:
    """Those of WIDE that fit a KV cache of one of the `capacities` (in rising order), each with the largest one at
    which its rows take no more than MOST_BYTES."""
    found = {}
    for rows in WIDE:
        fitting = [each for each in capacities if rows <= each and activation_bytes(model, rows, each) <= MOST_BYTES]
        if fitting:
            found[rows] = fitting[-1]
    return found
