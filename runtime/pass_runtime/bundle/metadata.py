"""What trunk.onnx says of itself in its metadata: a manifest of another model is found out when the graph is opened."""

from __future__ import annotations

from pass_runtime.bundle.manifest import Manifest, ModelInfo
from pass_runtime.bundle.sampling import Rule

METADATA = "pass_toolkit"
"""Key in the graph's metadata; the value is JSON."""
FIELDS = ("dtype", "weights", "vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "max_capacity")


def metadata(model: ModelInfo, lookahead: int, rule: Rule) -> dict[str, str | int]:
    """The numbers that no input or output shows, and those that they do."""
    return {f"model.{name}": getattr(model, name) for name in FIELDS} | {"lookahead.length": lookahead, "rule": rule}


def trunk_metadata(manifest: Manifest) -> dict[str, str | int]:
    """What the bundle's trunk must say."""
    return metadata(manifest.model, manifest.lookahead.length, manifest.rule)
