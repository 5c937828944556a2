"""The drafts of look-ahead rows, sampled as in the runtime: each draft with the noise of its own position."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from pass_trainer.drafter import Drafter
from pass_trainer.windows import full_groups, pack

Ids = npt.NDArray[np.int64]
Sample = Callable[[npt.NDArray[np.float32], Ids], Ids]
"""(logits [N,V], the positions [N] of the tokens that they are for) -> tokens [N]."""
NOT_MADE = -1
"""Stands for a draft that follows a wrong one."""


@torch.no_grad()
def drafts_of(
    drafter: Drafter, tokens: list[int], anchors: range, lookahead: int, sample: Sample, *, only_right: bool = False
) -> Ids:
    """Return drafts [anchors, lookahead]. When tokens[:a + 2] are known, those of anchor a are for a + 2, a + 3, ...

    With a head, a draft depends on the drafts before it, as in the runtime. The token after the anchor is the text's.
    only_right: drafts that follow one which differs from the text are NOT_MADE, because nothing can come of them. Most
    drafts are such, and a draft needs logits over the vocabulary, the head, and sampling.
    """
    if not anchors:
        return np.zeros((0, lookahead), np.int64)
    hidden, positions = group_states(drafter, tokens, anchors, lookahead)
    drafts = np.full((len(anchors), lookahead), NOT_MADE, np.int64)
    text = np.array([*tokens, *[NOT_MADE - 1] * (lookahead + 1)])  # a draft beyond the text is never right
    going = np.arange(len(anchors))
    for step in range(lookahead):
        before = np.concatenate([text[positions[going, :1] - 1], drafts[going, :step]], 1)
        logits = last_logits(drafter, hidden[going, : step + 1], torch.from_numpy(before))
        drafts[going, step] = sample(logits.cpu().numpy(), positions[going, step])
        if only_right:
            going = going[drafts[going, step] == text[positions[going, step]]]
        if not len(going):
            break
    return drafts


def group_states(drafter: Drafter, tokens: list[int], anchors: range, lookahead: int) -> tuple[torch.Tensor, Ids]:
    """Return the hidden states [anchors,L,H] of every anchor's look-ahead rows, and the positions [anchors,L] of the
    tokens that they draft."""
    known = torch.tensor(tokens[: anchors[-1] + 2])
    # A row sees its anchor and the tokens before it, so no row sees the padding after the text.
    row = torch.nn.functional.pad(known, (0, max(0, anchors[-1] + lookahead + 1 - len(known))))
    windows = pack([full_groups(anchors[0] + 1, anchors[-1] + lookahead + 1, 1, lookahead)], len(row))
    device = drafter.lookahead.device
    hidden, _ = drafter.states(row[None].to(device), windows.to(device))
    shape = (len(anchors), lookahead)
    return hidden.view(*shape, -1), windows.depth.view(shape).numpy() + 1


def last_logits(drafter: Drafter, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Map the states [P,j,H] of the first j rows of groups, and the tokens [P,j] before their drafts, to the logits
    [P,V] of draft j, float32: with a head, -inf for tokens that are no candidates."""
    if drafter.head is None:
        return drafter.logits(hidden[:, -1]).float()
    logits, before = drafter.logits(hidden), before.to(hidden.device)
    index = torch.arange(before.shape[1], device=before.device).expand_as(before)
    ids, adjusted = drafter.head(hidden, logits, before, index)
    chosen = torch.full_like(logits[:, -1], -torch.inf, dtype=torch.float32)
    return chosen.scatter(-1, ids[:, -1], adjusted[:, -1])
