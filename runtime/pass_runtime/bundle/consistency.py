"""Does a manifest contradict itself? Its numbers are checked against the tensors and plans that it lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pass_runtime.bundle.head import BLOCKS, file_size, layout
from pass_runtime.bundle.head import FILE as HEAD_FILE
from pass_runtime.bundle.plan import Plan, bundle_plans
from pass_runtime.bundle.tensors import Kind, logprobs_tensors, tail_tensors

if TYPE_CHECKING:
    from pass_runtime.bundle.manifest import Graph, Manifest, PlanInfo, Tensor

CACHE_PARTS = ("key", "value")


def inconsistency(manifest: Manifest) -> str | None:
    """The first contradiction in a few words, None where there is none."""
    return next(_problems(manifest), None)


def cache_names(prefix: str, layers: int) -> list[str]:
    """`past` -> past_key.0 .. past_key.n-1, past_value.0 .. past_value.n-1 (the order of the graph)."""
    return [f"{prefix}_{part}.{i}" for part in CACHE_PARTS for i in range(layers)]


def _problems(manifest: Manifest) -> Iterator[str]:
    yield from _of_model(manifest)
    yield from _of_trunk(manifest)
    yield from _of_head(manifest)
    yield from _of_plans(manifest)
    yield from _of_tensors(manifest.logprobs, logprobs_tensors(manifest.model.vocab_size))
    yield from _of_feeds(manifest)


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
    cache = ("batch", model.kv_heads, "capacity", model.head_dim)
    for tensors, prefix in ((trunk.inputs, "past"), (trunk.outputs, "present")):
        found = {tensor.name: tensor for tensor in tensors if tensor.name.startswith(f"{prefix}_")}
        if set(found) != set(cache_names(prefix, model.layers)):
            yield f"model.layers is {model.layers} and the trunk has {len(found)} {prefix} tensors"
        for tensor in found.values():
            if tensor.shape != cache:
                yield (
                    f"{tensor.name} is {_shape(tensor)}, not [batch,{model.kv_heads},capacity,{model.head_dim}] "
                    "(model.kv_heads, model.head_dim)"
                )
            if tensor.dtype != model.dtype:
                yield f"{tensor.name} is {tensor.dtype} and model.dtype {model.dtype}"
    logits = _named(trunk, "logits")
    if logits is None or logits.shape[-1:] != (model.vocab_size,):
        yield f"the trunk's logits are not those of model.vocab_size {model.vocab_size}"
    if (_named(trunk, "lookahead_rows") is not None) != manifest.lookahead.reads_rows:
        yield f"lookahead.adapter_rank is {manifest.lookahead.adapter_rank} and the trunk says otherwise"


def _of_head(manifest: Manifest) -> Iterator[str]:
    model, head, hidden = manifest.model, manifest.lookahead.head, _named(manifest.trunk, "hidden")
    if (hidden is None) != (head is None):
        yield "lookahead.head says otherwise than the trunk"
    if head is None or hidden is None:
        return
    if (hidden.dtype, hidden.shape) != ("float32", ("batch", "lookahead_rows", model.hidden_size)):
        yield f"hidden is {hidden.dtype} {_shape(hidden)}, not float32 [batch,lookahead_rows,{model.hidden_size}]"
    stored = manifest.files.get(HEAD_FILE)
    size = file_size(layout(model.vocab_size, model.hidden_size, head.rank, head.width))
    if stored is None or stored.bytes != size:
        yield f"{HEAD_FILE} is not of lookahead.head.rank {head.rank} and lookahead.head.width {head.width}"
    if head.blocks != BLOCKS:
        yield f"lookahead.head.blocks is {head.blocks}, and this version's tails have {BLOCKS}"


def _of_plans(manifest: Manifest) -> Iterator[str]:
    length = manifest.lookahead.length
    expected = {plan.name: plan for plan in bundle_plans(length)}
    if [plan.name for plan in manifest.plans] != list(expected):
        yield f"the plans are not those of lookahead.length {length}"
        return
    for info in manifest.plans:
        yield from _of_plan(manifest, info, expected[info.name])


def _of_plan(manifest: Manifest, info: PlanInfo, plan: Plan) -> Iterator[str]:
    constants = type(info.constants).of(plan, manifest.model.vocab_size)
    expected = {"drafts": plan.drafts, "groups": plan.groups, "next": plan.next.name}
    expected |= {f"constants.{name}": value for name, value in constants}
    found = {name: getattr(info, name) for name in ("drafts", "groups", "next")}
    found |= {f"constants.{name}": value for name, value in info.constants}
    for name, value in expected.items():
        if found[name] != value:
            yield f"{name} of plan {info.name} is not what such a plan has"
    for sampler, tail in info.tails.items():
        yield from _of_tensors(tail, tail_tensors(plan, manifest.model.vocab_size, manifest.model.hidden_size))
        compares = manifest.rule == "rejection" and plan.drafts > 0 and sampler != "greedy"
        if (_named(tail, "draft_probs") is not None) != compares:
            yield f"rule is {manifest.rule} and {tail.file} is of another"
        by_head = manifest.lookahead.head is not None and plan.next.drafts > 0
        if (_named(tail, "hidden") is not None) != by_head:
            yield f"lookahead.head says otherwise than {tail.file}"


def _of_tensors(graph: Graph, expected: Mapping[str, Kind]) -> Iterator[str]:
    for tensor in (*graph.inputs, *graph.outputs):
        if expected.get(tensor.name) != (tensor.dtype, tensor.shape):
            yield f"{tensor.name} of {graph.file} cannot be {tensor.dtype} {_shape(tensor)}"


def _of_feeds(manifest: Manifest) -> Iterator[str]:
    graphs = [manifest.trunk, *(tail for plan in manifest.plans for tail in plan.tails.values())]
    outputs = {tensor.name for graph in graphs for tensor in graph.outputs}
    expected = {name: fed for name in outputs if (fed := fed_by(name)) is not None}
    for name in sorted(expected.keys() | manifest.feeds.keys()):
        if manifest.feeds.get(name) != expected.get(name):
            yield f"feeds has {name} -> {manifest.feeds.get(name)}, not {expected.get(name)}"


def fed_by(output: str) -> str | None:
    """The input of the next graph or pass that is the memory of `output`; None where it has memory of its own."""
    if output == "next_ids":
        return "input_ids"
    for prefix, fed in (("present_", "past_"), ("next_", "")):
        if output.startswith(prefix):
            return output.replace(prefix, fed, 1)
    return None


def _named(graph: Graph, name: str) -> Tensor | None:
    return next((tensor for tensor in (*graph.inputs, *graph.outputs) if tensor.name == name), None)


def _shape(tensor: Tensor) -> str:
    return f"[{','.join(map(str, tensor.shape))}]"
