"""Estimates the device memory that decoding with engines needs, before a build starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pass_runtime.backends.memory import activation_bytes, item_size
from pass_runtime.bundle.manifest import Manifest, Profile
from pass_runtime.errors import PassError

RESERVED_BYTES = 512 << 20
"""For the CUDA context, the driver and the tails."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes besides RESERVED_BYTES. activations: an upper bound, as if no kernels were fused.
    workspace: 0 if there is no limit."""

    weights: int
    kv_cache: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.workspace + RESERVED_BYTES

    def __str__(self) -> str:
        parts = [f"{name} {size / 2**30:.2f}" for name, size in vars(self).items() if size]
        return (
            f"{self.total / 2**30:.2f} GiB ({', '.join(parts)}, reserved "
            f"{RESERVED_BYTES / 2**30:.2f})"
        )


def estimate(
    bundle: Path,
    manifest: Manifest,
    profiles: Sequence[Profile],
    capacity: int,
    max_batch_size: int,
    workspace: int,
) -> MemoryEstimate:
    """Return an estimate. profiles: the trunk's. capacity: in tokens. workspace: in bytes."""
    model = manifest.model
    trunk = bundle / manifest.trunk.file
    weights = sum(
        path.stat().st_size
        for path in (trunk, trunk.with_name(f"{trunk.name}.data"))
        if path.exists()
    )
    # Keys and values of every layer
    entry_bytes = 2 * model.layers * model.kv_heads * model.head_dim * item_size(model.dtype)
    names = ("width", "columns", "logit_rows", "batch")
    activations = max(
        activation_bytes(model, *(profile.sizes[name][-1] for name in names))
        for profile in profiles
    )
    return MemoryEstimate(weights, entry_bytes * capacity * max_batch_size, activations, workspace)


def check_fits(needed: MemoryEstimate, available: int | None, capacity: int) -> None:
    """Raise PassError if the GPU's memory, `available` bytes, is too small."""
    if available is not None and needed.total > available:
        raise PassError(
            f"the engines need about {needed}, and the GPU has {available / 2**30:.2f} GiB; lower "
            f"--max-seq-len (the capacity is now {capacity} tokens) or --max-batch-size, "
            "or export with --weights int4"
        )
