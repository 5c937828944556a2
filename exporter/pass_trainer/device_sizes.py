"""How much a device works on at once: sequences that are written together, and sequences of a step.

The sizes depend on the device's whole memory, not on what is free, so that the same seed gives the
same text and steps.
"""

from __future__ import annotations

import torch

from pass_exporter.model.families import Geometry
from pass_trainer.config import TrainConfig
from pass_trainer.distill import SHARD_SEQUENCES

MAX_SHARD_SEQUENCES = 1536
"""An H200 wrote so many in 14 to 20 s: more would only delay the first step."""
MAX_BATCH = 64
WRITING_SHARE, TRAINING_SHARE = 0.25, 0.25
"""Shares of a GPU's memory for the text writer's K/V and logits, and for a step's activations."""
SAMPLING_COPIES = 6
"""Copies of a sequence's logits [V] in float32 that sampling needs: logits, sorted, probabilities,
their sums, ..."""


def device_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def shard_size(memory: int | None, geometry: Geometry, length: int) -> int:
    """Return the sequences of `length` tokens that are written together: 64 on a CPU; on a GPU
    those whose K/V and logits fit, a multiple of 64."""
    if memory is None:
        return SHARD_SEQUENCES
    each = _kv_bytes(geometry) * length + SAMPLING_COPIES * 4 * geometry.vocab_size
    fitting = int(memory * WRITING_SHARE / each) // SHARD_SEQUENCES * SHARD_SEQUENCES
    return min(max(fitting, SHARD_SEQUENCES), MAX_SHARD_SEQUENCES)


def batch_size(
    memory: int | None, geometry: Geometry, intermediate: int, config: TrainConfig
) -> int:
    """Return the sequences of a step: 1 on a CPU; on a GPU what fits, at most MAX_BATCH.

    intermediate: the width of an MLP's inner layer. A look-ahead row keeps some 6 tensors of the
    hidden size and 5 of `intermediate` in each layer for its backward pass, in 16 bits.
    """
    if memory is None:
        return 1
    rows = config.anchors * sum(config.decay**i for i in range(config.lookahead))
    row = geometry.layers * 2 * (6 * geometry.hidden_size + 5 * intermediate)
    each = rows * row + config.recipe.length * _kv_bytes(geometry)
    return min(max(int(memory * TRAINING_SHARE / each), 1), MAX_BATCH)


def _kv_bytes(geometry: Geometry) -> int:
    """Bytes of a token's K/V in 16 bits."""
    return geometry.layers * 2 * geometry.kv_heads * geometry.head_dim * 2
