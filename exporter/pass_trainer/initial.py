"""Makes the weights that training starts with: new ones, or those of an earlier run."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import Adapter, truncated
from pass_exporter.model.draft_head import DraftHead, new_head
from pass_exporter.model.load import LoadedModel
from pass_exporter.model.lookahead import LookaheadWeights, mean_embedding, read_lookahead
from pass_runtime.errors import PassError
from pass_trainer.config import HEAD_RANK, HEAD_WIDTH, TrainConfig
from pass_trainer.drafter import Drafter, layer_of, new_adapter


def make_drafter(config: TrainConfig, loaded: LoadedModel) -> Drafter:
    """Return the drafter that `config` trains. Raises PassError if `start` does not fit."""
    start = read_or_baseline(config.start, config.lookahead, loaded.model)
    generator = torch.Generator().manual_seed(config.seed)
    adapter = _adapter(config, loaded, start, generator) if config.adapter == "lora" else None
    head = _head(config, loaded, start, generator) if config.head else None
    return Drafter(loaded.model, start.embeddings, adapter, head, config.aim)


def read_or_baseline(path: Path | None, lookahead: int, model: PreTrainedModel) -> LookaheadWeights:
    """Return what a weights file has, with the first `lookahead` embeddings, or the untrained
    baseline."""
    return (
        mean_embedding(model, lookahead) if path is None else read_lookahead(path, lookahead, model)
    )


def _adapter(
    config: TrainConfig, loaded: LoadedModel, start: LookaheadWeights, generator: torch.Generator
) -> Adapter:
    layers = int(loaded.model.config.num_hidden_layers)
    if not 0 <= config.adapter_from < layers:
        raise PassError(
            f"--adapter-from must be 0 to {layers - 1}, a layer of the model, not "
            f"{config.adapter_from}"
        )
    if start.adapter is None:
        return new_adapter(loaded.model, config.rank, generator, config.adapter_from)
    if start.adapter.rank < config.rank:
        raise PassError(
            f"{config.start} has an adapter of rank {start.adapter.rank}; use --rank "
            f"{start.adapter.rank} or less"
        )
    kept = [
        i for i, name in enumerate(start.adapter.names) if layer_of(name) >= config.adapter_from
    ]
    return truncated(start.adapter.subset(kept), config.rank).requires_grad_(True)


def _head(
    config: TrainConfig, loaded: LoadedModel, start: LookaheadWeights, generator: torch.Generator
) -> DraftHead:
    embeddings, head = loaded.model.get_output_embeddings().weight, start.head
    if head is None:
        return new_head(
            embeddings, config.head_rank or HEAD_RANK, config.head_width or HEAD_WIDTH, generator
        )
    if (config.head_rank or head.rank, config.head_width or head.width) != (head.rank, head.width):
        raise PassError(
            f"{config.start} has a head with --head-rank {head.rank} --head-width {head.width}; "
            "give the same sizes, or none"
        )
    return head.requires_grad_(True)
