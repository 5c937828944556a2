"""How often drafts survive: acceptance by position and the tokens per pass to expect of each plan.

Measured on text that the frozen model itself wrote, with the frozen model's own distribution as the judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pass_exporter.progress import Step
from pass_runtime.bundle.noise import MEMBERS, vocabulary_blocks
from pass_runtime.bundle.sampling import MAX_CANDIDATES
from pass_runtime.errors import PassError
from pass_trainer.distill import Sequences
from pass_trainer.drafter import Drafter
from pass_trainer.windows import full_groups, pack

STRIDE = 6
"""Places between two drafts that are scored."""
NOISE_DRAWS = 8
"""Samples by place, where drafts are sampled."""


@dataclass(frozen=True)
class Acceptance:
    """match[i]: the share of places where draft i is the model's own choice, whatever became of the drafts before it.
    chain[i]: the share where drafts 0..i all are. top4[i]: the model's choice is among the draft's four likeliest.
    overlap[i]: mean of sum_x min(p(x), q(x)), the rate at which the rejection rule accepts draft i; no rule has more.
    """

    places: int
    match: tuple[float, ...]
    chain: tuple[float, ...]
    top4: tuple[float, ...]
    overlap: tuple[float, ...]

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
            "overlap": [round(value, 4) for value in self.overlap],
            "chain": [round(value, 4) for value in self.chain],
            "accepted": round(self.accepted, 4),
            "tau": {plan: round(value, 4) for plan, value in self.tau().items()},
        }


@torch.no_grad()
def measure(
    drafter: Drafter,
    data: Sequences,
    lookahead: int,
    temperature: float = 0.0,
    top_k: int = 0,
    progress: Step | None = None,
) -> Acceptance:
    """Draft at every STRIDE-th place of the model's own writing in `data`, a sequence at a time.

    With a temperature, draft and model draw with the same noise (the exponential races of `pass_runtime.bundle.noise`),
    so `match` is the runtime's rule. Sequences too short for a group are left out.
    """
    device = drafter.lookahead.device
    generator = torch.Generator(device).manual_seed(0)
    right, top4, overlap = [], [], []
    for index in range(len(data)):
        prompt, length = int(data.prompts[index]), int(data.lengths[index])
        groups = full_groups(prompt, length, STRIDE, lookahead)
        if any(groups):
            tokens = data.tokens[index : index + 1, :length].to(device)
            drafts, targets = drafter.log_probs(tokens, pack([groups], length).to(device))
            same, near, common = _compare(drafts[0], targets[0], temperature, top_k, generator)
            right.append(same.view(-1, lookahead).cpu())
            top4.append(near.view(-1, lookahead).cpu())
            overlap.append(common.view(-1, lookahead).cpu())
        if progress is not None:
            progress(index + 1, len(data))
    if not right:
        raise PassError(f"no sequence has room for {lookahead} drafts; give more text")
    matches, near_matches = torch.cat(right).float(), torch.cat(top4).float()
    return Acceptance(
        len(matches),
        tuple(matches.mean(0).tolist()),
        tuple(matches.cumprod(1).mean(0).tolist()),
        tuple(near_matches.mean(0).tolist()),
        tuple(torch.cat(overlap).mean(0).tolist()),
    )


def _compare(
    drafts: torch.Tensor, targets: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """drafts, targets [R,V] log probabilities -> [draws*R], draw by draw: whether both choose the
    same token, and whether the model's choice is among the draft's four likeliest; and [R], sum_x min(p(x), q(x)).
    """
    if temperature == 0:
        choice = targets.argmax(-1)
        same = drafts.argmax(-1) == choice
        return same, (drafts.topk(4, -1).indices == choice[:, None]).any(-1), same.float()
    p, q = (_truncate(logits / temperature, top_k).softmax(-1) for logits in (targets, drafts))
    draws, nears = [], []
    for _ in range(NOISE_DRAWS):
        rows, blocks = len(p), vocabulary_blocks(p.shape[1])
        of_blocks = p.new_empty(rows, blocks).exponential_(generator=generator)
        of_members = p.new_empty(rows, MEMBERS).exponential_(generator=generator)
        choice = _race(p, of_blocks, of_members)
        draws.append(_race(q, of_blocks, of_members) == choice)
        nears.append((drafts.topk(4, -1).indices == choice[:, None]).any(-1))
    return torch.cat(draws), torch.cat(nears), torch.minimum(p, q).sum(-1)


def _race(p: torch.Tensor, of_blocks: torch.Tensor, of_members: torch.Tensor) -> torch.Tensor:
    """p [R,V], noise [R,K] and [R,8] -> [R] tokens: `pass_runtime.bundle.reference.two_races`."""
    rows, blocks = of_blocks.shape
    padded = torch.nn.functional.pad(p, (0, blocks * MEMBERS - p.shape[1])).view(rows, MEMBERS, blocks)
    winner = (padded.sum(1) / of_blocks).argmax(-1)
    member = (padded[torch.arange(rows), :, winner] / of_members).argmax(-1)
    return member * blocks + winner


def _truncate(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    if not top_k:
        return logits
    threshold = logits.topk(min(top_k, MAX_CANDIDATES), -1).values[:, -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)
