"""The draft head: a small network that adds to a look-ahead row what the row does not know, the token before it.

For the rows j = 0, 1, ... of a group, with h_j [H] the hidden state that the LM head reads, l_j [V] the row's logits,
and t_j the token before the row's draft (the new root, then the drafts so far):

    s_j = silu(hidden h_j + token table[t_j] + state s_{j-1} + bias)      s_{-1} = 0
    draft j is sampled from the logits l_j(c) + table[c] . (out s_j) of the candidates c; no other token is possible

table [V,r] is what the model knows of its tokens: the rows of its LM head less their mean, times `projection` [H,r],
which `new_head` takes from their principal directions. It is frozen; a weights file has the projection in its place.
Files of earlier versions have a trained `table` instead. One that was widened has both: columns of a table first, then
those of a projection.

The candidates are the tokens of the CANDIDATE_BLOCKS blocks with the largest l_j in them, where a block is the noise's
(`pass_runtime.bundle.noise`): the CANDIDATES likeliest tokens are among them. `pass_exporter.tails.definitions` has
the same in numpy. (Recurrent drafters over hidden states: Hydra, arXiv 2402.05109; Clover, arXiv 2405.00263.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from pass_runtime.bundle.head import CANDIDATE_BLOCKS, Head, has_subset
from pass_runtime.bundle.noise import BLOCK_SIZE, vocabulary_blocks

PREFIX = "head."
TRAINED = ("hidden", "token", "state", "bias", "out")
TABLE, PROJECTION = "table", "projection"
SCALED = 96
"""The main directions whose numbers have a root mean square of 1; those of others are smaller, as they are in the
model."""


class DraftHead(torch.nn.Module):
    """table [V,r], hidden [m,H], token [m,r], state [m,m], bias [m], out [r,m].

    tensors: those of TRAINED, and PROJECTION [H,r] or TABLE, or both. embeddings [V,H]: the rows of the model's LM
    head, from which a projection makes columns of the table, in float16 as bundles have it.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], embeddings: torch.Tensor) -> None:
        super().__init__()
        for name in TRAINED:
            self.register_parameter(name, torch.nn.Parameter(tensors[name].float()))
        self.sources = {name: tensors[name].float() for name in (TABLE, PROJECTION) if name in tensors}
        parts = [self.sources[TABLE]] if TABLE in self.sources else []
        if PROJECTION in self.sources:
            parts.append(_centred(embeddings) @ self.sources[PROJECTION])
        self.register_buffer(TABLE, torch.cat(parts, 1).half().float(), persistent=False)
        self.table: torch.Tensor
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
        """m, the size of a state."""
        return self.hidden.shape[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors under their names in a weights file."""
        trained = {name: getattr(self, name).detach() for name in TRAINED}
        return {f"{PREFIX}{name}": tensor for name, tensor in (self.sources | trained).items()}

    def arrays(self) -> Head:
        """Return the weights as the tails of a bundle read them."""
        turned = {name: getattr(self, name).detach().float().cpu().numpy().T for name in TRAINED}
        table = self.table.cpu().numpy().astype(np.float16)
        return Head(table, **{name: np.ascontiguousarray(array) for name, array in turned.items()})

    def forward(
        self, hidden: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the candidates' ids [B,R,C] and their adjusted logits [B,R,C].

        hidden [B,R,H]; logits [B,R,V]; tokens [B,R], the t_j; index [B,R], the j: rows of one group are consecutive.
        """
        ids = candidates(logits.detach())
        read = hidden.float() @ self.hidden.T + self.table[tokens] @ self.token.T + self.bias
        states = torch.nn.functional.silu(read)
        for _ in range(int(index.max()) if index.numel() else 0):  # j iterations make the states of rows 0..j final
            before = torch.nn.functional.pad(states, (0, 0, 1, 0))[:, :-1] * (index > 0)[..., None]
            states = torch.nn.functional.silu(read + before @ self.state.T)
        added = torch.einsum("brcd,brd->brc", self.table[ids], states @ self.out.T)
        return ids, logits.gather(-1, ids).float() + added


def candidates(logits: torch.Tensor) -> torch.Tensor:
    """Map logits [...,V] to ids [...,C]: the tokens of the CANDIDATE_BLOCKS blocks that hold the largest logits. In a
    small vocabulary, and in one that blocks do not divide, all ids are candidates."""
    vocabulary = logits.shape[-1]
    blocks = vocabulary_blocks(vocabulary)
    if not has_subset(vocabulary):
        return torch.arange(vocabulary, device=logits.device).expand(logits.shape)
    best = logits.reshape(*logits.shape[:-1], BLOCK_SIZE, blocks).amax(-2)
    chosen = best.topk(CANDIDATE_BLOCKS, -1, sorted=False).indices
    ids: torch.Tensor = chosen[..., None, :] + blocks * torch.arange(BLOCK_SIZE, device=logits.device)[:, None]
    return ids.flatten(-2)


def new_head(embeddings: torch.Tensor, rank: int, width: int, generator: torch.Generator) -> DraftHead:
    """Return a head before training, which adds 0 to every logit. embeddings [V,H]: the rows of the model's LM head, of
    whose principal directions the table has the first `rank`, at most H."""
    size, rank = embeddings.shape[1], min(rank, embeddings.shape[1])
    tensors = {
        PROJECTION: _directions(embeddings)[:, :rank],
        "hidden": _random(generator, width, size),
        "token": _random(generator, width, rank),
        "state": _random(generator, width, width) * 0.1,
        "bias": torch.zeros(width),
        "out": torch.zeros(rank, width),
    }
    return DraftHead(tensors, embeddings)


def widened(head: DraftHead, embeddings: torch.Tensor, rank: int, width: int, generator: torch.Generator) -> DraftHead:
    """Return a head of larger sizes that computes what `head` does, until it is trained: new numbers of the state read
    the row and the token at random and add nothing yet, and the old ones do not read the table's new columns, which are
    the principal directions `head.rank`, `head.rank + 1`, ... (At most H, as in `new_head`.)"""
    rank = max(min(rank, embeddings.shape[1]), head.rank)
    more, units = rank - head.rank, width - head.width
    old = {name: getattr(head, name).detach() for name in TRAINED}
    projection = torch.cat(
        [
            head.sources.get(PROJECTION, torch.empty(embeddings.shape[1], 0)),
            _directions(embeddings)[:, head.rank : rank],
        ],
        1,
    )
    pad = torch.nn.functional.pad
    tensors = head.sources | {
        PROJECTION: projection,
        "hidden": torch.cat([old["hidden"], _random(generator, units, embeddings.shape[1])]),
        "token": torch.cat([pad(old["token"], (0, more)), _random(generator, units, rank)]),
        "state": pad(old["state"], (0, units, 0, units)),
        "bias": pad(old["bias"], (0, units)),
        "out": pad(old["out"], (0, units, 0, more)),
    }
    return DraftHead(tensors, embeddings)


def _directions(embeddings: torch.Tensor) -> torch.Tensor:
    """[H,H]: the principal directions of embeddings [V,H], the main one first, scaled so that a table of the first
    SCALED has a root mean square of 1."""
    centred = _centred(embeddings)
    _, directions = torch.linalg.eigh(centred.T @ centred)  # eigenvalues ascend
    directions = directions.flip(-1)
    scaled: torch.Tensor = directions / (centred @ directions[:, :SCALED]).pow(2).mean().sqrt()
    return scaled


def _random(generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)


def _centred(embeddings: torch.Tensor) -> torch.Tensor:
    return embeddings.detach().float() - embeddings.detach().float().mean(0)
