"""Measures how often drafts are the model's greedy choice, on held-out sequences. Acceptance in
real use is measured by `pass_trainer.evaluation`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pass_runtime.errors import PassError
from pass_trainer.drafter import Drafter
from pass_trainer.text import Sequences
from pass_trainer.windows import full_groups, make_windows

STRIDE_TOKENS = 6
"""From one anchor, after which drafts are measured, to the next."""


@dataclass(frozen=True)
class Agreement:
    """Shares of `places` anchors after which match[i]: draft i is the model's choice;
    cumulative[i]: drafts 0..i all are; top4[i]: the choice is among the four likeliest of row i."""

    places: int
    match: tuple[float, ...]
    cumulative: tuple[float, ...]
    top4: tuple[float, ...]

    @property
    def accepted(self) -> float:
        """Accepted drafts per anchor."""
        return sum(self.cumulative)

    def tau(self) -> dict[str, float]:
        """Return the expected tokens per pass by plan."""
        # In two-pass decoding, only every second pass has drafts to verify.
        return {"ar": 1.0, "two-pass": 1 + self.accepted / 2, "fused": 1 + self.accepted}

    def as_json(self) -> dict[str, Any]:
        return {
            "places": self.places,
            "match": [round(value, 4) for value in self.match],
            "top4": [round(value, 4) for value in self.top4],
            "chain": [round(value, 4) for value in self.cumulative],
            "accepted": round(self.accepted, 4),
            "tau": {plan: round(value, 4) for plan, value in self.tau().items()},
        }


@torch.no_grad()
def measure(drafter: Drafter, data: Sequences, lookahead: int) -> Agreement:
    """Measure drafts in `data`. Sequences without room for `lookahead` drafts are left out; raises
    PassError if all are."""
    device = drafter.embeddings.device
    matches, in_top4 = [], []
    for index in range(len(data)):
        prompt_length, length = int(data.prompt_lengths[index]), int(data.lengths[index])
        groups = full_groups(prompt_length, length, STRIDE_TOKENS, lookahead)
        if groups.any():
            tokens = data.tokens[index : index + 1, :length].to(device)
            windows = make_windows([groups], length, device)
            draft_logprobs, logprobs = drafter.log_probs(tokens, windows)
            greedy = logprobs.argmax(-1)
            likeliest = (draft_logprobs.topk(4, -1).indices == greedy[:, None]).any(-1)
            matches.append((draft_logprobs.argmax(-1) == greedy).view(-1, lookahead).cpu())
            in_top4.append(likeliest.view(-1, lookahead).cpu())
    if not matches:
        raise PassError(
            f"no held-out sequence has room for {lookahead} drafts; hold out more (--held-out) or "
            "longer ones (--sequence-length)"
        )
    match, top4 = torch.cat(matches).float(), torch.cat(in_top4).float()
    return Agreement(
        len(match),
        tuple(match.mean(0).tolist()),
        tuple(match.cumprod(1).mean(0).tolist()),
        tuple(top4.mean(0).tolist()),
    )
