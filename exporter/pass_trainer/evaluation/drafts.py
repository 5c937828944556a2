"""Computes the drafts of look-ahead rows, sampled with the noise of their positions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from pass_trainer.drafter import Drafter
from pass_trainer.windows import full_groups, make_windows

Ids = npt.NDArray[np.int64]
Sample = Callable[[npt.NDArray[np.float32], Ids], Ids]
"""(logits [N,V], positions [N] of the sampled tokens) -> tokens [N]."""
SKIPPED_DRAFT = -1
"""The value in place of a draft that was not computed because a draft before it is wrong."""
PADDING_TOKEN = -2
"""The value of tokens beyond the text. No draft equals it."""


@torch.no_grad()
def drafts_of(
    drafter: Drafter,
    tokens: list[int],
    anchors: range,
    lookahead: int,
    sample: Sample,
    *,
    stop_at_wrong: bool = False,
) -> Ids:
    """Return drafts [anchors, lookahead]. Those of anchor a are for the tokens a + 2, a + 3, ...,
    given tokens[:a + 2].

    With a head, a draft depends on the drafts before it, as in the runtime.

    stop_at_wrong: do not compute drafts after a wrong one, which are never accepted; they are
    SKIPPED_DRAFT. This saves time, because most drafts follow a wrong one.
    """
    if not anchors:
        return np.zeros((0, lookahead), np.int64)
    hidden, positions = group_states(drafter, tokens, anchors, lookahead)
    drafts = np.full((len(anchors), lookahead), SKIPPED_DRAFT, np.int64)
    text = np.array([*tokens, *[PADDING_TOKEN] * (lookahead + 1)])
    active = np.arange(len(anchors))
    for step in range(lookahead):
        before = np.concatenate([text[positions[active, :1] - 1], drafts[active, :step]], 1)
        logits = last_logits(drafter, hidden[active, : step + 1], torch.from_numpy(before))
        drafts[active, step] = sample(logits.cpu().numpy(), positions[active, step])
        if stop_at_wrong:
            active = active[drafts[active, step] == text[positions[active, step]]]
        if not len(active):
            break
    return drafts


def group_states(
    drafter: Drafter, tokens: list[int], anchors: range, lookahead: int
) -> tuple[torch.Tensor, Ids]:
    """Return the hidden states [anchors,L,H] of look-ahead rows, and their drafts' positions."""
    known = torch.tensor(tokens[: anchors[-1] + 2])
    # A row sees only its anchor and the tokens before it, so no row sees the padding.
    row = torch.nn.functional.pad(known, (0, max(0, anchors[-1] + lookahead + 1 - len(known))))
    groups = full_groups(anchors[0] + 1, anchors[-1] + lookahead + 1, 1, lookahead)
    device = drafter.embeddings.device
    windows = make_windows([groups], len(row), device)
    hidden, _ = drafter.hidden_states(row[None].to(device), windows)
    shape = (len(anchors), lookahead)
    return hidden.view(*shape, -1), windows.position.view(shape).cpu().numpy() + 1


def last_logits(drafter: Drafter, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the logits [P,V] float32 of the last of j drafts in P groups. With a head, they are
    -inf for all tokens but its candidates.

    hidden [P,j,H]: the states of the groups' first j rows. before [P,j] int64: the tokens before
    these rows' drafts.
    """
    if drafter.head is None:
        return drafter.logits(hidden[:, -1]).float()
    logits, before = drafter.logits(hidden), before.to(hidden.device)
    index = torch.arange(before.shape[1], device=before.device).expand_as(before)
    ids, adjusted = drafter.head(hidden, logits, before, index)
    chosen = torch.full_like(logits[:, -1], -torch.inf, dtype=torch.float32)
    return chosen.scatter(-1, ids[:, -1], adjusted[:, -1])
