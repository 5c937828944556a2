"""Reads and checks the manifest of a bundle, for everything that opens bundles.

trunk.onnx repeats some fields of the manifest in its metadata. Whoever opens the trunk compares the
two (`trunk_metadata`), so that the manifest of another model is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from pass_runtime.bundle import noise
from pass_runtime.bundle.bindings import fed_input
from pass_runtime.bundle.head import HEAD_FILE, head_file_size, head_layout
from pass_runtime.bundle.manifest import (
    FILE_NAME,
    MANIFEST_VERSION,
    Manifest,
    ModelInfo,
    NoiseInfo,
    Tensor,
)
from pass_runtime.bundle.sampling import Rule
from pass_runtime.bundle.tensors import PAST, PRESENT, SIZES, cache_names
from pass_runtime.errors import PassError

METADATA_KEY = "pass_toolkit"
"""The key under which the trunk's metadata has the repeated fields, as JSON."""
_FIELDS = (
    "dtype",
    "weights",
    "vocab_size",
    "hidden_size",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "max_capacity",
)
"""The fields of `ModelInfo` that the metadata repeats."""


def metadata(model: ModelInfo, lookahead: int, rule: Rule) -> dict[str, str | int]:
    """Return the repeated fields, by their names in the manifest, for a new trunk."""
    return {f"model.{name}": getattr(model, name) for name in _FIELDS} | {
        "lookahead.length": lookahead,
        "rule": rule,
    }


def trunk_metadata(manifest: Manifest) -> dict[str, str | int]:
    """Return the metadata that the trunk of a bundle with this manifest must have."""
    return metadata(manifest.model, manifest.lookahead.length, manifest.rule)


def read_manifest(bundle: Path) -> Manifest:
    """Read and validate `bundle`/pass_config.json. Raises PassError if it cannot be used."""
    path = bundle / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if bundle.suffix == ".gguf" or (bundle / "config.json").is_file():
            raise PassError(
                f"{bundle} is a model, not a bundle: make a bundle with `pass-export "
                f"--model {bundle}`"
            ) from None
        raise PassError(
            f"{bundle} is not a bundle: it has no {FILE_NAME} (make one with pass-export)"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PassError(f"cannot read {path}: {error}") from None
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise PassError(f"{path}: {_first_problem(error)}") from None
    expected = NoiseInfo(
        scheme=noise.SCHEME, members=noise.BLOCK_SIZE, row=noise.ROW_SIZE, bits=noise.BITS
    )
    if manifest.noise != expected:
        raise PassError(
            f"{path}: noise scheme {manifest.noise.scheme!r} or its table sizes are not this "
            f"version's {noise.SCHEME!r}; export again"
        )
    if (problem := next(_contradictions(manifest), None)) is not None:
        raise PassError(f"{path} contradicts itself: {problem}; export the bundle again")
    return manifest


def _first_problem(error: ValidationError) -> str:
    """Describe the first problem of an invalid manifest in one line, and count the others."""
    problem = error.errors(include_url=False)[0]
    key = " ".join(".".join(str(part) for part in problem["loc"]).split())
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r} (made by a newer pass-export? upgrade, or export again)"
    if key == "version" and problem["type"] != "missing":
        return (
            f"manifest version {problem['input']!r} is not {MANIFEST_VERSION} (export again "
            "with this version)"
        )
    others = f", and {error.error_count() - 1} more" if error.error_count() > 1 else ""
    return f"{key or 'file'}: {problem['msg']}{others}"


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield contradictions between fields that would crash a runtime or silently mislead it, and
    that no other check finds. (Other checks compare files with their hashes, and graphs, when they
    are opened, with the manifest.) The manifest's fields `drafts`, `groups`, `constants` and
    `feeds` are for other runtimes; this one derives their values from the names of plans and
    tensors, and does not check them."""
    model, lookahead = manifest.model, manifest.lookahead
    for token in (model.bos_token_id, *model.eos_token_ids):
        if token is not None and not 0 <= token < model.vocab_size:
            yield f"token {token} is not in the vocabulary of {model.vocab_size} (model.vocab_size)"
    for name in ("acceptance_per_position", "acceptance_per_position_sampled"):
        if len(getattr(lookahead, name)) > lookahead.length:
            yield f"lookahead.{name} is longer than lookahead.length"
    # `layouts` are computed from lookahead.length.
    if [(plan.name, plan.parents) for plan in manifest.plans] != [
        (layout.name, layout.parents) for layout in manifest.layouts
    ]:
        yield (
            "the plans, or their trees, are not those that this version has for "
            f"lookahead.length {lookahead.length}"
        )
    if (head := lookahead.head) is not None:
        stored = manifest.files.get(HEAD_FILE)
        size = head_file_size(
            head_layout(model.vocab_size, model.hidden_size, head.rank, head.width)
        )
        if stored is None or stored.bytes != size:
            yield (
                f"{HEAD_FILE} does not fit lookahead.head.rank {head.rank} and "
                f"lookahead.head.width {head.width}"
            )
    yield from _cache_contradictions(manifest)
    yield from _buffer_contradictions(manifest)


def _cache_contradictions(manifest: Manifest) -> Iterator[str]:
    """Compare the trunk's cache tensors with the sizes by which the KV cache is allocated."""
    model, trunk = manifest.model, manifest.trunk
    expected = ("batch", model.kv_heads, "capacity", model.head_dim)
    for tensors, prefix in ((trunk.inputs, PAST), (trunk.outputs, PRESENT)):
        cache = [tensor for tensor in tensors if tensor.name.startswith(prefix)]
        # Names are compared last: a damaged number of layers may be too large to list their names.
        if len(cache) != 2 * model.layers or {each.name for each in cache} != set(
            cache_names(prefix, model.layers)
        ):
            yield (
                f"model.layers is {model.layers}, but the trunk's {len(cache)} {prefix}* "
                "tensors are not 2 per layer"
            )
        for tensor in cache:
            if tensor.shape != expected:
                sizes = f"model.kv_heads {model.kv_heads} and model.head_dim {model.head_dim}"
                yield f"{tensor.name} is {list(tensor.shape)}, which does not fit {sizes}"
            if tensor.dtype != model.dtype:
                yield (
                    f"{tensor.name} is {tensor.dtype}, which does not fit model.dtype {model.dtype}"
                )


def _buffer_contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield tensors whose dtype or rank differs from that of another tensor in the same buffer, and
    tensors whose shape has an unknown size or another vocabulary size than the model."""
    vocab = manifest.model.vocab_size
    first: dict[str, Tensor] = {}  # by buffer, the first tensor in it
    for graph in manifest.graphs:
        for tensor in (*graph.inputs, *graph.outputs):
            for size in tensor.shape:
                if isinstance(size, str) and size not in SIZES:
                    yield f"{tensor.name} of {graph.file} has the unknown size {size}"
            if tensor.name in ("logits", "processed_logits") and tensor.shape[2:] != (vocab,):
                yield (
                    f"{tensor.name} of {graph.file} is {list(tensor.shape)}, but "
                    f"model.vocab_size is {vocab}"
                )
            buffer = fed_input(tensor.name) or tensor.name
            other = first.setdefault(buffer, tensor)
            if (other.dtype, len(other.shape)) != (tensor.dtype, len(tensor.shape)):
                yield (
                    f"{tensor.name} of {graph.file} is {tensor.dtype} {list(tensor.shape)}, but "
                    f"shares memory with {other.name}, {other.dtype} {list(other.shape)}"
                )
