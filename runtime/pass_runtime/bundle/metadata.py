"""The metadata in trunk.onnx. It must equal the manifest, so that the manifest of another model is refused at load."""

from __future__ import annotations

from pass_runtime.bundle.manifest import Manifest, ModelInfo
from pass_runtime.bundle.sampling import Rule

METADATA = "pass_toolkit"
"""Key in the graph's metadata; the value is JSON."""
FIELDS = ("dtype", "weights", "vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "max_capacity")


def metadata(model: ModelInfo, lookahead: int, rule: Rule) -> dict[str, str | int]:
    """The model's numbers by the names of their manifest fields, with the look-ahead length and the rule."""
    return {f"model.{name}": getattr(model, name) for name in FIELDS} | {"lookahead.length": lookahead, "rule": rule}


def trunk_metadata(manifest: Manifest) -> dict[str, str | int]:
    """The metadata that the trunk of this bundle must have."""
    return metadata(manifest.model, manifest.lookahead.length, manifest.rule)
