"""The drafts of look-ahead rows, sampled as in the runtime: each draft with the noise of its own position."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from pass_exporter.model.head import DraftHead
from pass_trainer.drafter import Drafter
from pass_trainer.windows import full_groups, pack

Ids = npt.NDArray[np.int64]
Sample = Callable[[npt.NDArray[np.float32], Ids], Ids]
"""(logits [N,V], the positions [N] of the tokens that they are for) -> tokens [N]."""


@torch.no_grad()
def drafts_of(drafter: Drafter, tokens: list[int], anchors: range, lookahead: int, sample: Sample) -> Ids:
    """Return drafts [anchors, lookahead]. When tokens[:a + 2] are known, those of anchor a are for a + 2, a + 3, ...

    With a head, a draft depends on the drafts before it, as in the runtime. The token after the anchor is the text's.
    """
    if not anchors:
        return np.zeros((0, lookahead), np.int64)
    known = torch.tensor(tokens[: anchors[-1] + 2])
    # A row sees its anchor and the tokens before it, so no row sees the padding after the text.
    row = torch.nn.functional.pad(known, (0, max(0, anchors[-1] + lookahead + 1 - len(known))))
    windows = pack([full_groups(anchors[0] + 1, anchors[-1] + lookahead + 1, 1, lookahead)], len(row))
    device = drafter.lookahead.device
    rows = drafter.drafts(row[None].to(device), windows.to(device))[:2]
    hidden, logits = (each.view(len(anchors), lookahead, -1) for each in rows)
    positions = windows.depth.view(len(anchors), lookahead).numpy() + 1
    before = known[anchors[0] + 1 :, None].to(device)  # [anchors, 1]; every draft is appended
    for step in range(lookahead):
        chosen = logits[:, step]
        if drafter.head is not None:
            chosen = _with_head(drafter.head, hidden[:, : step + 1], logits[:, : step + 1], before)
        drawn = sample(chosen.float().cpu().numpy(), positions[:, step])
        before = torch.cat([before, torch.from_numpy(drawn)[:, None].to(device)], 1)
    return before[:, 1:].cpu().numpy()


def _with_head(head: DraftHead, hidden: torch.Tensor, logits: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Map hidden [P,j,H], logits [P,j,V] and previous tokens [P,j] to the last row's logits [P,V]: -inf for tokens that
    are no candidates."""
    index = torch.arange(before.shape[1], device=before.device).expand_as(before)
    ids, adjusted = head(hidden, logits, before, index)
    chosen = torch.full_like(logits[:, -1], -torch.inf, dtype=torch.float32)
    return chosen.scatter(-1, ids[:, -1], adjusted[:, -1])
