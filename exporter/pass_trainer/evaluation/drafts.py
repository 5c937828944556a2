"""Computes the drafts of look-ahead rows, sampled as in the runtime: each with the noise of its own position."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from pass_trainer.drafter import Drafter
from pass_trainer.windows import full_groups, pack

Ids = npt.NDArray[np.int64]
Sample = Callable[[npt.NDArray[np.float32], Ids], Ids]
"""(logits [N,V], positions [N] of the sampled tokens) -> tokens [N]."""
SKIPPED_DRAFT = -1
"""The value in place of a draft that was not computed because a draft before it is wrong."""


@torch.no_grad()
def drafts_of(
    drafter: Drafter, tokens: list[int], anchors: range, lookahead: int, sample: Sample, *, only_right: bool = False
) -> Ids:
    """Return drafts [anchors, lookahead]. Those of anchor a are for the tokens a + 2, a + 3, ..., given tokens[:a + 2].

    With a head, a draft depends on the drafts before it, as in the runtime.

    only_right: do not compute drafts after a wrong one, which are never accepted; they are SKIPPED_DRAFT. This saves
    time, because most drafts follow a wrong one.
    """
    if not anchors:
        return np.zeros((0, lookahead), np.int64)
    hidden, positions = group_states(drafter, tokens, anchors, lookahead)
    drafts = np.full((len(anchors), lookahead), SKIPPED_DRAFT, np.int64)
    text = np.array([*tokens, *[SKIPPED_DRAFT - 1] * (lookahead + 1)])  # Drafts beyond the text are never right.
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
    """Return the hidden states [anchors,L,H] of every anchor's look-ahead rows, and their drafts' positions
    [anchors,L]."""
    known = torch.tensor(tokens[: anchors[-1] + 2])
    # A row sees only its anchor and the tokens before it, so no row sees the padding.
    row = torch.nn.functional.pad(known, (0, max(0, anchors[-1] + lookahead + 1 - len(known))))
    windows = pack([full_groups(anchors[0] + 1, anchors[-1] + lookahead + 1, 1, lookahead)], len(row))
    device = drafter.lookahead.device
    hidden, _ = drafter.states(row[None].to(device), windows.to(device))
    shape = (len(anchors), lookahead)
    return hidden.view(*shape, -1), windows.depth.view(shape).numpy() + 1


def last_logits(drafter: Drafter, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the logits [P,V] float32 of draft j of P groups. With a head, tokens that are not candidates have -inf.

    hidden [P,j,H]: the states of the groups' first j rows. before [P,j]: the tokens before these rows' drafts.
    """
    if drafter.head is None:
        return drafter.logits(hidden[:, -1]).float()
    logits, before = drafter.logits(hidden), before.to(hidden.device)
    index = torch.arange(before.shape[1], device=before.device).expand_as(before)
    ids, adjusted = drafter.head(hidden, logits, before, index)
    chosen = torch.full_like(logits[:, -1], -torch.inf, dtype=torch.float32)
    return chosen.scatter(-1, ids[:, -1], adjusted[:, -1])
