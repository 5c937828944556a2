"""The draft head: look-ahead rows do not know which token stands before theirs; this small network does.

For the rows j = 0, 1, ... of a group, with h_j [H] what the LM head reads of row j, l_j [V] its logits, and t_j the
token that stands before its place (the new root, then the drafts made so far):

    s_j = silu(hidden h_j + token table[t_j] + state s_{j-1} + bias)      s_{-1} = 0
    draft j is chosen by l_j(c) + table[c] . (out s_j) among the candidates c; other tokens have no chance

The candidates are the tokens of the BLOCKS blocks with the largest l_j in them, where a block is the noise's
(`pass_runtime.bundle.noise`): the CANDIDATES likeliest tokens are among them. `pass_runtime.bundle.head` defines
the same in numpy. (Recurrent drafters over hidden states: Hydra, arXiv 2402.05109; Clover, arXiv 2405.00263.)
"""

from __future__ import annotations

import math

import numpy as np
import torch

from pass_runtime.bundle.head import BLOCKS, Head, has_subset
from pass_runtime.bundle.noise import MEMBERS, vocabulary_blocks

PREFIX = "head."
NAMES = ("table", "hidden", "token", "state", "bias", "out")


class DraftHead(torch.nn.Module):
    """table [V,r], hidden [m,H], token [m,r], state [m,m], bias [m], out [r,m]."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name in NAMES:
            self.register_parameter(name, torch.nn.Parameter(tensors[name].float()))
        self.table: torch.nn.Parameter
        self.hidden: torch.nn.Parameter
        self.token: torch.nn.Parameter
        self.state: torch.nn.Parameter
        self.bias: torch.nn.Parameter
        self.out: torch.nn.Parameter

    @property
    def rank(self) -> int:
        return self.table.shape[1]

    @property
    def width(self) -> int:
        """m, numbers of a state."""
        return self.hidden.shape[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, as they are written to a file."""
        return {f"{PREFIX}{name}": getattr(self, name).detach() for name in NAMES}

    def arrays(self) -> Head:
        """As a bundle's tails read them."""
        turned = {name: getattr(self, name).detach().float().cpu().numpy().T for name in NAMES}
        table = turned.pop("table").T.astype(np.float16)
        return Head(table, **{name: np.ascontiguousarray(array) for name, array in turned.items()})

    def forward(
        self, hidden: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [B,R,H], logits [B,R,V], tokens [B,R] (t_j), index [B,R] (j: a row's group goes on in the next row) ->
        candidates' ids [B,R,C] and adjusted logits [B,R,C]."""
        ids = candidates(logits.detach())
        read = hidden.float() @ self.hidden.T + self.table[tokens] @ self.token.T + self.bias
        states = torch.nn.functional.silu(read)
        for _ in range(int(index.max()) if index.numel() else 0):  # after j rounds the states of rows 0..j are right
            before = torch.nn.functional.pad(states, (0, 0, 1, 0))[:, :-1] * (index > 0)[..., None]
            states = torch.nn.functional.silu(read + before @ self.state.T)
        added = torch.einsum("brcd,brd->brc", self.table[ids], states @ self.out.T)
        return ids, logits.gather(-1, ids).float() + added


def candidates(logits: torch.Tensor) -> torch.Tensor:
    """[...,V] -> [...,C] ids: the members of the BLOCKS blocks that hold the largest logits; all ids of a small
    vocabulary, or of one that blocks do not divide."""
    vocabulary = logits.shape[-1]
    blocks = vocabulary_blocks(vocabulary)
    if not has_subset(vocabulary):
        return torch.arange(vocabulary, device=logits.device).expand(logits.shape)
    best = logits.reshape(*logits.shape[:-1], MEMBERS, blocks).amax(-2)
    chosen = best.topk(BLOCKS, -1, sorted=False).indices
    ids: torch.Tensor = chosen[..., None, :] + blocks * torch.arange(MEMBERS, device=logits.device)[:, None]
    return ids.flatten(-2)


def new_head(embeddings: torch.Tensor, rank: int, width: int, generator: torch.Generator) -> DraftHead:
    """The start: the table is the embeddings [V,H] in their `rank` main directions, and nothing is added yet."""
    size = embeddings.shape[1]
    centred = embeddings.float() - embeddings.float().mean(0)
    _, directions = torch.linalg.eigh(centred.T @ centred)  # eigenvalues rise
    table = centred @ directions[:, -rank:]
    table = table / table.pow(2).mean().sqrt()

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    tensors = {
        "table": table,
        "hidden": random(width, size),
        "token": random(width, rank),
        "state": random(width, width) * 0.1,
        "bias": torch.zeros(width),
        "out": torch.zeros(rank, width),
    }
    return DraftHead(tensors)
