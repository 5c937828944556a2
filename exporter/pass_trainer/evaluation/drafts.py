"""Computes drafts after every token of a text, sampled as the runtime samples them."""

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
"""Stands for a draft that was not computed because a draft before it is wrong."""
PADDING_TOKEN = -2
"""Stands for tokens after the end of the text. No draft equals it."""


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
    """Return the drafts [anchors, lookahead] in a text.

    The drafts of anchor a are for tokens a + 2, a + 3, ...: token a + 1 is the one that the pass
    with root a writes itself. With a head, a draft depends on the drafts before it, as in the
    runtime.

    stop_at_wrong: whether drafts after a wrong draft, which are never accepted, are SKIPPED_DRAFT.
    This saves time, because most drafts follow a wrong one.
    """
    if not anchors:
        return np.zeros((0, lookahead), np.int64)
    hidden, positions = group_states(drafter, tokens, anchors, lookahead)
    drafts = np.full((len(anchors), lookahead), SKIPPED_DRAFT, np.int64)
    text = np.array([*tokens, *[PADDING_TOKEN] * (lookahead + 1)])
    active = np.arange(len(anchors))  # the rows of `drafts` that get another draft
    for j in range(lookahead):
        before = np.concatenate([text[positions[active, :1] - 1], drafts[active, :j]], 1)
        logits = last_logits(drafter, hidden[active, : j + 1], torch.from_numpy(before))
        drafts[active, j] = sample(logits.cpu().numpy(), positions[active, j])
        if stop_at_wrong:
            active = active[drafts[active, j] == text[positions[active, j]]]
        if not len(active):
            break
    return drafts


def group_states(
    drafter: Drafter, tokens: list[int], anchors: range, lookahead: int
) -> tuple[torch.Tensor, Ids]:
    """Return the hidden states [anchors,L,H] of look-ahead rows, and the positions [anchors,L] of
    their drafts."""
    used = torch.tensor(tokens[: anchors[-1] + 1])
    # Look-ahead rows see the tokens up to their anchor, so none sees this padding, which
    # `full_groups` wants as room for all drafts.
    padded = torch.nn.functional.pad(used, (0, lookahead))
    groups = full_groups(anchors[0] + 1, len(padded), 1, lookahead)
    device = drafter.embeddings.device
    windows = make_windows([groups], len(padded), device)
    hidden, _ = drafter.hidden_states(padded[None].to(device), windows)
    shape = (len(anchors), lookahead)
    return hidden.view(*shape, -1), windows.position.view(shape).cpu().numpy() + 1


def last_logits(drafter: Drafter, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the logits [P,V] float32 of draft j in P groups; j is 1 for the first draft.

    With a head, tokens that are no candidates have -inf.
    hidden [P,j,H]: the hidden states of the groups' first j rows. before [P,j] int64: the token
    before the draft of each row.
    """
    if drafter.head is None:
        return drafter.logits(hidden[:, -1]).float()
    logits, before = drafter.logits(hidden), before.to(hidden.device)
    index = torch.arange(before.shape[1], device=before.device).expand_as(before)
    ids, adjusted = drafter.head(hidden, logits, before, index)
    chosen = torch.full_like(logits[:, -1], -torch.inf, dtype=torch.float32)
    return chosen.scatter(-1, ids[:, -1], adjusted[:, -1])
