"""Checks that a manifest does not contradict itself: its numbers against the tensors and plans that it lists.

What follows from a plan's name (drafts, groups, next, constants) and from tensors' names (feeds) is not compared: this
runtime derives it, and the manifest lists it for runtimes in other languages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pass_runtime.bundle.head import CANDIDATE_BLOCKS, file_size, layout
from pass_runtime.bundle.head import FILE as HEAD_FILE
from pass_runtime.bundle.manifest import Graph, Manifest, PlanInfo, Tensor
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.tensors import (
    HIDDEN_OUTPUT,
    MODEL_SIZES,
    PAST,
    PRESENT,
    ROWS_INPUT,
    Kind,
    cache_names,
    logprobs_tensors,
    processors_tensors,
    tail_tensors,
    trunk_shapes,
)


def inconsistency(manifest: Manifest) -> str | None:
    """The first contradiction, as words for a message; None where there is none."""
    return next(_problems(manifest), None)


def _problems(manifest: Manifest) -> Iterator[str]:
    yield from _of_model(manifest)
    yield from _of_trunk(manifest)
    yield from _of_head(manifest)
    yield from _of_plans(manifest)
    yield from _of_tensors(manifest.logprobs, logprobs_tensors(manifest.model.vocab_size))
    if manifest.processors is not None:
        yield from _of_tensors(manifest.processors, processors_tensors(manifest.model.vocab_size))


def _of_model(manifest: Manifest) -> Iterator[str]:
    model = manifest.model
    if model.heads % model.kv_heads:
        yield f"model.heads {model.heads} is no multiple of model.kv_heads {model.kv_heads}"
    for token in (model.bos_token_id, *model.eos_token_ids):
        if token is not None and not 0 <= token < model.vocab_size:
            yield f"token {token} is not in the vocabulary of {model.vocab_size} (model.vocab_size)"
    for name in ("acceptance_per_position", "acceptance_per_position_sampled"):
        if len(getattr(manifest.lookahead, name)) > manifest.lookahead.length:
            yield f"lookahead.{name} is longer than lookahead.length"


def _of_trunk(manifest: Manifest) -> Iterator[str]:
    model, trunk = manifest.model, manifest.trunk
    expected = {
        name: tuple(getattr(model, size) if size in MODEL_SIZES else size for size in shape)
        for name, shape in trunk_shapes(model.layers).items()
    }
    for tensors, prefix in ((trunk.inputs, PAST), (trunk.outputs, PRESENT)):
        found = {tensor.name: tensor for tensor in tensors if tensor.name.startswith(prefix)}
        if set(found) != set(cache_names(prefix, model.layers)):
            yield f"model.layers is {model.layers} and the trunk has {len(found)} {prefix[:-1]} tensors"
            return
        for name, tensor in found.items():
            if tensor.shape != expected[name]:
                yield f"{name} is {_shape(tensor.shape)}, not {_shape(expected[name])} (model.kv_heads, model.head_dim)"
            if tensor.dtype != model.dtype:
                yield f"{name} is {tensor.dtype} and model.dtype {model.dtype}"
    logits = _named(trunk, "logits")
    if logits is None or logits.shape[-1:] != (model.vocab_size,):
        yield f"the trunk's logits are not those of model.vocab_size {model.vocab_size}"
    if (_named(trunk, ROWS_INPUT) is not None) != manifest.lookahead.reads_rows:
        yield f"lookahead.adapter_rank is {manifest.lookahead.adapter_rank} and the trunk says otherwise"


def _of_head(manifest: Manifest) -> Iterator[str]:
    model, head, hidden = manifest.model, manifest.lookahead.head, _named(manifest.trunk, HIDDEN_OUTPUT)
    if (hidden is None) != (head is None):
        yield "lookahead.head says otherwise than the trunk"
    if head is None or hidden is None:
        return
    if (hidden.dtype, hidden.shape) != ("float32", ("batch", "lookahead_rows", model.hidden_size)):
        yield f"hidden is {hidden.dtype} {_shape(hidden.shape)}, not float32 [batch,lookahead_rows,{model.hidden_size}]"
    stored = manifest.files.get(HEAD_FILE)
    size = file_size(layout(model.vocab_size, model.hidden_size, head.rank, head.width))
    if stored is None or stored.bytes != size:
        yield f"{HEAD_FILE} is not of lookahead.head.rank {head.rank} and lookahead.head.width {head.width}"
    if head.blocks != CANDIDATE_BLOCKS:
        yield f"lookahead.head.blocks is {head.blocks}, and this version's tails have {CANDIDATE_BLOCKS}"


def _of_plans(manifest: Manifest) -> Iterator[str]:
    length = manifest.lookahead.length
    expected = {plan.name: plan for plan in manifest.layouts}
    if [plan.name for plan in manifest.plans] != list(expected):
        yield f"the plans are not those of lookahead.length {length}"
        return
    if any(plan.parents for plan in manifest.plans) and (manifest.lookahead.head is None or manifest.rule != "match"):
        yield "there are trees of drafts, which need lookahead.head and the rule match"
    for info in manifest.plans:
        yield from _of_plan(manifest, info, expected[info.name])


def _of_plan(manifest: Manifest, info: PlanInfo, plan: Plan) -> Iterator[str]:
    if info.parents != plan.parents:
        yield f"the tree of {info.name} is not the one that this version knows"
    for sampler, tail in info.tails.items():
        yield from _of_tensors(tail, tail_tensors(plan, manifest.model.vocab_size, manifest.model.hidden_size))
        compares = manifest.rule == "rejection" and plan.drafts > 0 and sampler != "greedy"
        if (_named(tail, "draft_probs") is not None) != compares:
            yield f"rule is {manifest.rule} and {tail.file} is of another"
        by_head = manifest.lookahead.head is not None and plan.next.drafts > 0
        if (_named(tail, HIDDEN_OUTPUT) is not None) != by_head:
            yield f"lookahead.head says otherwise than {tail.file}"


def _of_tensors(graph: Graph, expected: Mapping[str, Kind]) -> Iterator[str]:
    for tensor in (*graph.inputs, *graph.outputs):
        if expected.get(tensor.name) != (tensor.dtype, tensor.shape):
            yield f"{tensor.name} of {graph.file} cannot be {tensor.dtype} {_shape(tensor.shape)}"


def _named(graph: Graph, name: str) -> Tensor | None:
    return next((tensor for tensor in (*graph.inputs, *graph.outputs) if tensor.name == name), None)


def _shape(shape: tuple[int | str, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"
