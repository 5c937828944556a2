"""How drafts do while training goes on: greedy agreement by position, on text that the frozen model itself wrote.

Such text loops, and loops are easy to draft: `pass_trainer.held_out` has the figures of real use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pass_runtime.errors import PassError
from pass_trainer.distill import Sequences
from pass_trainer.drafter import Drafter
from pass_trainer.windows import full_groups, pack

STRIDE = 6
"""Places between two drafts that are scored."""


@dataclass(frozen=True)
class Acceptance:
    """match[i]: the share of places where draft i is the model's own choice, whatever became of the drafts before it.
    chain[i]: the share where drafts 0..i all are. top4[i]: the model's choice is among the draft's four likeliest.
    """

    places: int
    match: tuple[float, ...]
    chain: tuple[float, ...]
    top4: tuple[float, ...]

    @property
    def accepted(self) -> float:
        """Mean number of drafts accepted in a row."""
        return sum(self.chain)

    def tau(self) -> dict[str, float]:
        """Expected tokens per pass: two-pass spends a second pass on its 2 + accepted tokens, fused does not."""
        return {"ar": 1.0, "two-pass": 1 + self.accepted / 2, "fused": 1 + self.accepted}

    def as_json(self) -> dict[str, Any]:
        return {
            "places": self.places,
            "match": [round(value, 4) for value in self.match],
            "top4": [round(value, 4) for value in self.top4],
            "chain": [round(value, 4) for value in self.chain],
            "accepted": round(self.accepted, 4),
            "tau": {plan: round(value, 4) for plan, value in self.tau().items()},
        }


@torch.no_grad()
def measure(drafter: Drafter, data: Sequences, lookahead: int) -> Acceptance:
    """Draft at every STRIDE-th place of the model's own writing in `data`, a sequence at a time.

    Sequences too short for a group are left out.
    """
    device = drafter.lookahead.device
    right, near = [], []
    for index in range(len(data)):
        prompt, length = int(data.prompts[index]), int(data.lengths[index])
        groups = full_groups(prompt, length, STRIDE, lookahead)
        if any(groups):
            tokens = data.tokens[index : index + 1, :length].to(device)
            drafts, targets = drafter.log_probs(tokens, pack([groups], length).to(device))
            choice = targets[0].argmax(-1)
            right.append((drafts[0].argmax(-1) == choice).view(-1, lookahead).cpu())
            near.append((drafts[0].topk(4, -1).indices == choice[:, None]).any(-1).view(-1, lookahead).cpu())
    if not right:
        raise PassError(f"no sequence has room for {lookahead} drafts; give more text")
    matches, near_matches = torch.cat(right).float(), torch.cat(near).float()
    return Acceptance(
        len(matches),
        tuple(matches.mean(0).tolist()),
        tuple(matches.cumprod(1).mean(0).tolist()),
        tuple(near_matches.mean(0).tolist()),
    )
