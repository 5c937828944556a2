"""Checks of a manifest that nothing else would make: contradictions that would crash a runtime or mislead it silently.

Hashes guard the files, the trunk's metadata and the graphs' own inputs and outputs are compared with the manifest when
they are opened, and what follows from names (drafts, groups, constants, feeds) this runtime derives.
"""

from __future__ import annotations

from collections.abc import Iterator

from pass_runtime.bundle.bindings import fed_by
from pass_runtime.bundle.head import FILE as HEAD_FILE
from pass_runtime.bundle.head import file_size, layout
from pass_runtime.bundle.manifest import Manifest, Tensor
from pass_runtime.bundle.tensors import PAST, PRESENT, SIZES, cache_names


def inconsistency(manifest: Manifest) -> str | None:
    """The first contradiction, as words for a message; None if there is none."""
    return next(_problems(manifest), None)


def _problems(manifest: Manifest) -> Iterator[str]:
    model, lookahead = manifest.model, manifest.lookahead
    for token in (model.bos_token_id, *model.eos_token_ids):
        if token is not None and not 0 <= token < model.vocab_size:
            yield f"token {token} is not in the vocabulary of {model.vocab_size} (model.vocab_size)"
    for name in ("acceptance_per_position", "acceptance_per_position_sampled"):
        if len(getattr(lookahead, name)) > lookahead.length:
            yield f"lookahead.{name} is longer than lookahead.length"
    if [(plan.name, plan.parents) for plan in manifest.plans] != [(p.name, p.parents) for p in manifest.layouts]:
        yield f"the plans and their trees are not this version's for lookahead.length {lookahead.length}"
    if (head := lookahead.head) is not None:
        stored = manifest.files.get(HEAD_FILE)
        if stored is None or stored.bytes != file_size(
            layout(model.vocab_size, model.hidden_size, head.rank, head.width)
        ):
            yield f"{HEAD_FILE} is not of lookahead.head.rank {head.rank} and lookahead.head.width {head.width}"
    yield from _of_cache(manifest)
    yield from _of_shared_memory(manifest)


def _of_cache(manifest: Manifest) -> Iterator[str]:
    """The KV cache is allocated by the model's numbers."""
    model, trunk = manifest.model, manifest.trunk
    expected = ("batch", model.kv_heads, "capacity", model.head_dim)
    for tensors, prefix in ((trunk.inputs, PAST), (trunk.outputs, PRESENT)):
        found = [tensor for tensor in tensors if tensor.name.startswith(prefix)]
        if {tensor.name for tensor in found} != set(cache_names(prefix, model.layers)):
            yield f"model.layers is {model.layers} and the trunk has {len(found)} {prefix[:-1]} tensors"
        for tensor in found:
            if tensor.shape != expected:
                yield f"{tensor.name} is {tensor.shape}, not {expected} (model.kv_heads, model.head_dim)"
            if tensor.dtype != model.dtype:
                yield f"{tensor.name} is {tensor.dtype} and model.dtype {model.dtype}"


def _of_shared_memory(manifest: Manifest) -> Iterator[str]:
    """Tensors of the same buffer must be alike, and the host must know their sizes."""
    tails = [tail for plan in manifest.plans for tail in plan.tails.values()]
    others = [] if manifest.processors is None else [manifest.processors]
    first: dict[str, Tensor] = {}
    for graph in (manifest.trunk, *tails, manifest.logprobs, *others):
        for tensor in (*graph.inputs, *graph.outputs):
            for size in tensor.shape:
                if isinstance(size, str) and size not in SIZES:
                    yield f"{tensor.name} of {graph.file} has an unknown size {size}"
            if tensor.name in ("logits", "processed_logits") and tensor.shape[2:] != (manifest.model.vocab_size,):
                yield f"{tensor.name} of {graph.file} are not those of model.vocab_size {manifest.model.vocab_size}"
            buffer = fed_by(tensor.name) or tensor.name
            other = first.setdefault(buffer, tensor)
            if (other.dtype, len(other.shape)) != (tensor.dtype, len(tensor.shape)):
                yield f"{tensor.name} of {graph.file} cannot be {tensor.dtype} {list(tensor.shape)}"
