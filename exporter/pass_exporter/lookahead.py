"""The look-ahead embeddings [L,H] that are baked into a trunk: trained ones from a file, or a stated baseline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from pass_runtime.errors import PassError

TENSOR = "lookahead"


@dataclass(frozen=True)
class Lookahead:
    """`embeddings` [L,H] float32, in the space of the decoder's inputs (after any embedding scale)."""

    embeddings: torch.Tensor
    trained: bool
    source: str


def mean_embedding(model: PreTrainedModel, length: int) -> Lookahead:
    """The untrained baseline: every row is the mean of the vocabulary's embeddings."""
    embedding = model.get_input_embeddings()
    scale = getattr(embedding, "scalar_embed_scale", 1.0)
    mean = embedding.weight.float().mean(0) * scale
    return Lookahead(mean.repeat(length, 1), False, "untrained: mean of the vocabulary embeddings")


def read_lookahead(path: Path, length: int, hidden_size: int) -> Lookahead:
    """The first `length` rows of `lookahead` [>=L,H] in a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            embeddings = file.get_tensor(TENSOR).float()
    except (OSError, SafetensorError) as error:
        raise PassError(f"cannot read look-ahead weights from {path}: {error}") from None
    if embeddings.ndim != 2 or embeddings.shape[1] != hidden_size:
        raise PassError(
            f"{path}: {TENSOR} has shape {list(embeddings.shape)}, but this model needs [{length}, {hidden_size}]; "
            "were these weights made for another model?"
        )
    if len(embeddings) < length:
        raise PassError(f"{path} holds {len(embeddings)} look-ahead rows; use --lookahead {len(embeddings)} or less")
    if not bool(torch.isfinite(embeddings).all()):
        raise PassError(f"{path}: {TENSOR} holds values that are not finite")
    return Lookahead(embeddings[:length], True, f"file:{path.name}")
