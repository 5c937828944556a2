"""The draft head: corrects a look-ahead row's logits by the token before its draft.

A look-ahead row is computed before this token is known. For the rows j = 0, 1, ... of a group, let
h_j [H] be the hidden state that the LM head reads, l_j [V] the row's logits, and t_j the token
before the row's draft (the new root, then the drafts so far):

    s_j = silu(hidden h_j + token table[t_j] + state s_{j-1} + bias)      s_{-1} = 0
    draft j is sampled from the logits l_j(c) + table[c] . (out s_j) of the candidates c; other
    tokens are not drafted

table [V,r] has a vector for each token: the rows of the LM head minus their mean, times
`projection` [H,r], which are principal directions of these rows (`new_head`). It is frozen, and a
weights file stores the projection instead. Files of earlier versions store a trained `table`. If
such a head was widened, its file has both: the table's columns come first, then the projection's.

The candidates are the tokens of the CANDIDATE_BLOCKS blocks (`pass_runtime.bundle.noise`) with the
largest l_j. `pass_exporter.tails.definitions` defines the same in numpy. (Recurrent drafters over
hidden states: Hydra, arXiv 2402.05109; Clover, arXiv 2405.00263.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from pass_runtime.bundle.head import CANDIDATE_BLOCKS, HeadArrays, has_candidate_subset
from pass_runtime.bundle.noise import BLOCK_SIZE, vocabulary_blocks

HEAD_PREFIX = "head."
TRAINED_TENSORS = ("hidden", "token", "state", "bias", "out")
TABLE, PROJECTION = "table", "projection"
SCALED_DIRECTIONS = 96
"""The table's columns of this many first directions have a root mean square of 1."""


class DraftHead(torch.nn.Module):
    """table [V,r], hidden [m,H], token [m,r], state [m,m], bias [m], out [r,m].

    tensors: those of TRAINED_TENSORS, and PROJECTION [H,r] or TABLE, or both.
    embeddings [V,H]: the weight of the model's LM head, from which the projection computes columns
    of the table. The table is rounded to float16, as in bundles.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], embeddings: torch.Tensor) -> None:
        super().__init__()
        for name in TRAINED_TENSORS:
            self.register_parameter(name, torch.nn.Parameter(tensors[name].float()))
        self.table_tensors = {
            name: tensors[name].float() for name in (TABLE, PROJECTION) if name in tensors
        }
        parts = [self.table_tensors[TABLE]] if TABLE in self.table_tensors else []
        if PROJECTION in self.table_tensors:
            parts.append(_centred(embeddings) @ self.table_tensors[PROJECTION])
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
        trained = {name: getattr(self, name).detach() for name in TRAINED_TENSORS}
        return {
            f"{HEAD_PREFIX}{name}": tensor
            for name, tensor in (self.table_tensors | trained).items()
        }

    def arrays(self) -> HeadArrays:
        """Return the weights in the layout and dtypes of a bundle's tails."""
        transposed = {
            name: getattr(self, name).detach().float().cpu().numpy().T for name in TRAINED_TENSORS
        }
        table = self.table.cpu().numpy().astype(np.float16)
        return HeadArrays(
            table, **{name: np.ascontiguousarray(array) for name, array in transposed.items()}
        )

    def forward(
        self, hidden: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the candidates' ids [B,R,C] and their adjusted logits [B,R,C].

        hidden [B,R,H]; logits [B,R,V]; tokens [B,R]: the t_j; index [B,R]: the j. Rows of one group
        are consecutive.
        """
        deepest = int(index.max()) if index.numel() else 0
        return self.adjusted(logits, self.corrections(hidden, tokens, index, deepest))

    def corrections(
        self, hidden: torch.Tensor, tokens: torch.Tensor, index: torch.Tensor, deepest: int
    ) -> torch.Tensor:
        """Return out s_j [...,R,r] for the inputs of `forward`. deepest: at least the largest."""
        inputs = hidden.float() @ self.hidden.T + self.table[tokens] @ self.token.T + self.bias
        states = torch.nn.functional.silu(inputs)
        for _ in range(deepest):  # After j iterations the states of rows 0..j are final.
            before = (
                torch.nn.functional.pad(states, (0, 0, 1, 0))[..., :-1, :] * (index > 0)[..., None]
            )
            states = torch.nn.functional.silu(inputs + before @ self.state.T)
        return states @ self.out.T

    def adjusted(
        self, logits: torch.Tensor, corrections: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map logits [...,V] to the candidates' ids [...,C] and adjusted logits [...,C]."""
        ids = candidates(logits.detach())
        added = torch.einsum("...cd,...d->...c", self.table[ids], corrections)
        return ids, logits.gather(-1, ids).float() + added


def candidates(logits: torch.Tensor) -> torch.Tensor:
    """Map logits [...,V] to ids [...,C]: the tokens of the CANDIDATE_BLOCKS best blocks.

    All ids are candidates if the vocabulary is small or not a multiple of the block size.
    """
    vocabulary = logits.shape[-1]
    blocks = vocabulary_blocks(vocabulary)
    if not has_candidate_subset(vocabulary):
        return torch.arange(vocabulary, device=logits.device).expand(logits.shape)
    best = logits.reshape(*logits.shape[:-1], BLOCK_SIZE, blocks).amax(-2)
    chosen = best.topk(CANDIDATE_BLOCKS, -1, sorted=False).indices
    ids: torch.Tensor = (
        chosen[..., None, :] + blocks * torch.arange(BLOCK_SIZE, device=logits.device)[:, None]
    )
    return ids.flatten(-2)


def new_head(
    embeddings: torch.Tensor, rank: int, width: int, generator: torch.Generator
) -> DraftHead:
    """Return an untrained head, which adds 0 to every logit.

    embeddings [V,H]: the weight of the model's LM head. rank: number of their principal directions
    in the table; at most H are used. width: size of a state.
    """
    size, rank = embeddings.shape[1], min(rank, embeddings.shape[1])
    tensors = {
        PROJECTION: _principal_directions(embeddings)[:, :rank],
        "hidden": _random(generator, width, size),
        "token": _random(generator, width, rank),
        "state": _random(generator, width, width) * 0.1,
        "bias": torch.zeros(width),
        "out": torch.zeros(rank, width),
    }
    return DraftHead(tensors, embeddings)


def widened(
    head: DraftHead, embeddings: torch.Tensor, rank: int, width: int, generator: torch.Generator
) -> DraftHead:
    """Return a larger head that computes the same as `head` until it is trained.

    The new elements of the state have random input weights and zero output weights. The table's new
    columns are the principal directions `head.rank`, `head.rank + 1`, ...; their weights to the old
    elements are zero.
    rank: at most H is used, as in `new_head`.
    """
    rank = max(min(rank, embeddings.shape[1]), head.rank)
    more, units = rank - head.rank, width - head.width
    old = {name: getattr(head, name).detach() for name in TRAINED_TENSORS}
    projected = head.table_tensors.get(PROJECTION, torch.empty(embeddings.shape[1], 0))
    projection = torch.cat([projected, _principal_directions(embeddings)[:, head.rank : rank]], 1)
    pad = torch.nn.functional.pad
    tensors = head.table_tensors | {
        PROJECTION: projection,
        "hidden": torch.cat([old["hidden"], _random(generator, units, embeddings.shape[1])]),
        "token": torch.cat([pad(old["token"], (0, more)), _random(generator, units, rank)]),
        "state": pad(old["state"], (0, units, 0, units)),
        "bias": pad(old["bias"], (0, units)),
        "out": pad(old["out"], (0, units, 0, more)),
    }
    return DraftHead(tensors, embeddings)


def _principal_directions(embeddings: torch.Tensor) -> torch.Tensor:
    """[H,H]: the principal directions of embeddings [V,H] as columns, by falling variance.

    They are scaled so that the table of the first SCALED_DIRECTIONS has a root mean square of 1.
    """
    centred = _centred(embeddings)
    _, directions = torch.linalg.eigh(centred.T @ centred)  # eigenvalues ascend
    directions = directions.flip(-1)
    scaled: torch.Tensor = (
        directions / (centred @ directions[:, :SCALED_DIRECTIONS]).pow(2).mean().sqrt()
    )
    return scaled


def _random(generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)


def _centred(embeddings: torch.Tensor) -> torch.Tensor:
    return embeddings.detach().float() - embeddings.detach().float().mean(0)
