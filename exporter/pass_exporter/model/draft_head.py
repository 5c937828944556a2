"""The draft head: corrects a look-ahead row's logits by the token before the row's draft.

For rows j = 0, 1, ... of a group with the LM head's input h_j [H], logits l_j [V] and the token t_j
before the row's draft:

    s_j = silu(hidden h_j + token table[t_j] + state s_{j-1} + bias)      s_{-1} = 0
    draft j is sampled from the logits l_j(c) + table[c] . (out s_j) of the candidates c

Candidates are the tokens of the CANDIDATE_BLOCKS blocks (`pass_runtime.bundle.noise`) with the
largest l_j. table [V,r] is the LM head minus its mean row, times `projection` [H,r], its principal
directions. Older files store a trained `table` instead.
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
"""So many columns of the table get a root mean square of 1."""


class DraftHead(torch.nn.Module):
    """tensors: hidden [m,H], token [m,r], state [m,m], bias [m], out [r,m], and PROJECTION [H,r] or
    TABLE [V,r]. The table is rounded to float16. embeddings [V,H]: the LM head."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], embeddings: torch.Tensor) -> None:
        super().__init__()
        for name in TRAINED_TENSORS:
            self.register_parameter(name, torch.nn.Parameter(tensors[name].float()))
        source = TABLE if TABLE in tensors else PROJECTION
        table = tensors[source].float()
        self._table_source = {source: table}
        if source == PROJECTION:
            table = _centred(embeddings) @ table
        self.register_buffer(TABLE, table.half().float(), persistent=False)
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
        return self.hidden.shape[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by their names in a weights file."""
        trained = {name: getattr(self, name).detach() for name in TRAINED_TENSORS}
        return {
            f"{HEAD_PREFIX}{name}": tensor
            for name, tensor in (self._table_source | trained).items()
        }

    def arrays(self) -> HeadArrays:
        """Return the weights in the layout and dtypes of a bundle."""
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
        """Return the candidates' ids and corrected logits [B,R,C] for hidden [B,R,H], logits
        [B,R,V], tokens [B,R] and index j [B,R]."""
        max_index = int(index.max()) if index.numel() else 0
        return self.adjusted(logits, self.corrections(hidden, tokens, index, max_index))

    def corrections(
        self, hidden: torch.Tensor, tokens: torch.Tensor, index: torch.Tensor, max_index: int
    ) -> torch.Tensor:
        """Return out s_j [...,R,r]. max_index: at least the largest j."""
        inputs = hidden.float() @ self.hidden.T + self.table[tokens] @ self.token.T + self.bias
        states = torch.nn.functional.silu(inputs)
        for _ in range(max_index):  # After j iterations the states of rows 0..j are final.
            row_before = torch.nn.functional.pad(states, (0, 0, 1, 0))[..., :-1, :]
            before = row_before * (index > 0)[..., None]  # s_{-1} = 0
            states = torch.nn.functional.silu(inputs + before @ self.state.T)
        return states @ self.out.T

    def adjusted(
        self, logits: torch.Tensor, corrections: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the candidates' ids and corrected logits [...,C] for logits [...,V]."""
        ids = candidates(logits.detach())
        added = torch.einsum("...cd,...d->...c", self.table[ids], corrections)
        return ids, logits.gather(-1, ids).float() + added


def candidates(logits: torch.Tensor) -> torch.Tensor:
    """Return the candidates' ids [...,C] by logits [...,V]."""
    vocab_size = logits.shape[-1]
    block_count = vocabulary_blocks(vocab_size)
    if not has_candidate_subset(vocab_size):
        return torch.arange(vocab_size, device=logits.device).expand(logits.shape)
    # Block k has the ids k, k + block_count, k + 2 * block_count, ...
    largest = logits.reshape(*logits.shape[:-1], BLOCK_SIZE, block_count).amax(-2)
    blocks = largest.topk(CANDIDATE_BLOCKS, -1, sorted=False).indices
    offsets = block_count * torch.arange(BLOCK_SIZE, device=logits.device)
    ids: torch.Tensor = blocks[..., None, :] + offsets[:, None]
    return ids.flatten(-2)


def new_head(
    embeddings: torch.Tensor, rank: int, width: int, generator: torch.Generator
) -> DraftHead:
    """Return an untrained head, which adds 0 to every logit. embeddings [V,H]: the LM head."""
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


def _principal_directions(embeddings: torch.Tensor) -> torch.Tensor:
    centred = _centred(embeddings)
    _, directions = torch.linalg.eigh(centred.T @ centred)  # by rising eigenvalues
    directions = directions.flip(-1)
    table = centred @ directions[:, :SCALED_DIRECTIONS]
    scaled: torch.Tensor = directions / table.pow(2).mean().sqrt()
    return scaled


def _random(generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)


def _centred(embeddings: torch.Tensor) -> torch.Tensor:
    rows = embeddings.detach().float()
    return rows - rows.mean(0)
