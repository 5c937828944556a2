"""How many sequences fit a device. Only its whole memory counts, so that the same seed gives the
same text and steps."""

from __future__ import annotations

import torch

from pass_exporter.model.families import Geometry
from pass_trainer.config import TrainConfig
from pass_trainer.text import SHARD_SEQUENCES

MAX_SHARD_SEQUENCES, MAX_BATCH = 1536, 64
"""An H200 wrote such a shard in 14 to 20 s."""
WRITING_SHARE, TRAINING_SHARE = 0.25, 0.25
"""Of a GPU's memory, for text's K/V and logits, and for a step's activations."""
SAMPLING_COPIES = 6
"""Tensors [V] in float32 for a sampled token."""


def device_bytes(device: torch.device) -> int | None:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def shard_size(memory: int | None, geometry: Geometry, length: int) -> int:
    """Return how many sequences are written together, a multiple of 64. memory: of the GPU, or
    None."""
    if memory is None:
        return SHARD_SEQUENCES
    sequence_bytes = _kv_bytes(geometry) * length + SAMPLING_COPIES * 4 * geometry.vocab_size
    fitting = int(memory * WRITING_SHARE / sequence_bytes) // SHARD_SEQUENCES * SHARD_SEQUENCES
    return min(max(fitting, SHARD_SEQUENCES), MAX_SHARD_SEQUENCES)


def batch_size(
    memory: int | None, geometry: Geometry, intermediate: int, config: TrainConfig
) -> int:
    """Return how many sequences are in a step, 1 on a CPU. intermediate: the width of an MLP."""
    if memory is None:
        return 1
    # The mean number of look-ahead rows, see `windows.sample_groups`.
    rows = config.anchors * sum(config.decay**i for i in range(config.lookahead))
    # A row keeps about 6 tensors of the hidden size and 5 of the inner size in each layer for its
    # backward pass, in 16 bits.
    row_bytes = geometry.layers * 2 * (6 * geometry.hidden_size + 5 * intermediate)
    sequence_bytes = rows * row_bytes + config.recipe.sequence_length * _kv_bytes(geometry)
    return min(max(int(memory * TRAINING_SHARE / sequence_bytes), 1), MAX_BATCH)


def _kv_bytes(geometry: Geometry) -> int:
    """Return the bytes of a token's K and V in 16 bits."""
    return geometry.layers * 2 * geometry.kv_heads * geometry.head_dim * 2
