"""Estimates the device memory that decoding with engines needs, before a build starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pass_runtime.backends.memory import activation_bytes, item_size
from pass_runtime.bundle.manifest import Manifest, Profile
from pass_runtime.errors import PassError

RESERVED_BYTES = 512 << 20
"""Bytes reserved for the CUDA context, the driver and the tails."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that decoding needs on the device, besides RESERVED_BYTES. activations: an upper bound,
    as if no kernels were fused. workspace: the limit on scratch memory; 0, which leaves it out of
    the estimate, if there is no limit."""

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
    """Return an estimate from the sizes of the trunk's files and of the model. profiles: those of
    the trunk. capacity: in tokens. workspace: in bytes."""
    model = manifest.model
    trunk = bundle / manifest.trunk.file
    weights = sum(
        path.stat().st_size
        for path in (trunk, trunk.with_name(f"{trunk.name}.data"))
        if path.exists()
    )
    # Keys and values of every layer
    entry_bytes = 2 * model.layers * model.kv_heads * model.head_dim * item_size(model.dtype)
    activations = max(_activations(manifest, profile) for profile in profiles)
    return MemoryEstimate(weights, entry_bytes * capacity * max_batch_size, activations, workspace)


def _activations(manifest: Manifest, profile: Profile) -> int:
    sizes = {name: largest for name, (_, _, largest) in profile.sizes.items()}
    return activation_bytes(
        manifest.model, sizes["width"], sizes["columns"], sizes["logit_rows"], sizes["batch"]
    )


def check_fits(needed: MemoryEstimate, available: int | None, capacity: int) -> None:
    """Raise PassError if the GPU's memory is too small. available: its bytes; None if unknown.
    capacity: the KV capacity in tokens, for the message."""
    if available is not None and needed.total > available:
        raise PassError(
            f"the engines need about {needed}, and the GPU has {available / 2**30:.2f} GiB; lower "
            f"--max-seq-len (the capacity is now {capacity} tokens) or --max-batch-size, "
            "or export with --weights int4"
        )
