"""Rounds a model's weights in place, and keeps their codes for the trunk's graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import Adapter, linear_layers
from pass_exporter.progress import Step
from pass_exporter.quantize.rounding import QuantizedWeight, fits, pack, round_to
from pass_exporter.quantize.spec import INT8, MAX_UNSIGNED_CODE, QuantSpec, WeightScheme
from pass_exporter.threads import one_thread


@dataclass
class QuantizedModel:
    """weights: codes, by names in the trunk such as `model.lm_head.weight`. calibration: which text
    was run, or None. table: codes of the embedding table; None if it is floats."""

    spec: QuantSpec
    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    calibration: str | None = None
    table: QuantizedWeight | None = None


DECODER_PREFIX, ADAPTER_PREFIX = "model.model.", "adapter."
LM_HEAD = "lm_head"
READERS = {
    "q_proj": "attention_in",
    "k_proj": "attention_in",
    "v_proj": "attention_in",
    "qkv_proj": "attention_in",
    "gate_proj": "mlp_in",
    "up_proj": "mlp_in",
}
"""What layers read that may read the same tensor as others of their module."""


def weight_name(layer: str) -> str:
    """Return the name in the trunk of the weight of a layer such as `layers.0.mlp.up_proj`."""
    return f"model.{LM_HEAD}.weight" if layer == LM_HEAD else f"{DECODER_PREFIX}{layer}.weight"


def layer_name(weight: str) -> str | None:
    """Return the layer whose `weight_name` is `weight`; None if there is none."""
    if weight == weight_name(LM_HEAD):
        return LM_HEAD
    return (
        weight.removeprefix(DECODER_PREFIX).removesuffix(".weight")
        if weight.startswith(DECODER_PREFIX)
        else None
    )


def quantized_modules(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Return the decoder's linear layers and the LM head (LM_HEAD) by name."""
    return {**linear_layers(model), LM_HEAD: model.lm_head}


def input_groups(model: PreTrainedModel) -> list[tuple[str, ...]]:
    """Return the decoder's linear layers, grouped by the tensor that they read."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in linear_layers(model):
        module, _, part = name.rpartition(".")
        groups.setdefault((module, READERS.get(part, part)), []).append(name)
    return [tuple(names) for names in groups.values()]


def shares_table(model: PreTrainedModel, spec: QuantSpec) -> bool:
    """Whether the embedding table gets the values of the LM head's codes."""
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    return tied and model.dtype == torch.float32 and spec.keeps_codes


def layer_schemes(
    model: PreTrainedModel, spec: QuantSpec, fine_head: WeightScheme
) -> dict[str, WeightScheme]:
    """Return the scheme of every layer to round. fine_head: of an LM head that needs more than 4
    bits."""
    if spec.scheme is None or spec.lm_head is None:
        return {}
    schemes = {
        name: spec.attention_in or spec.scheme
        if READERS.get(name.rpartition(".")[2]) == "attention_in"
        else spec.scheme
        for name in linear_layers(model)
    }
    # Embeddings of 4 bits would cost too much.
    coarse = shares_table(model, spec) and spec.lm_head.code_type == "int4"
    return schemes | {LM_HEAD: fine_head if coarse else spec.lm_head}


def set_weight(module: torch.nn.Module, values: torch.Tensor) -> None:
    """Replace the weight of a layer. Other modules that share it keep theirs."""
    module.weight = torch.nn.Parameter(values, requires_grad=False)


def round_weights(
    model: PreTrainedModel,
    adapter: Adapter | None,
    schemes: Mapping[str, WeightScheme],
    quantized: QuantizedModel,
    step: Step,
) -> None:
    """Round the layers of `schemes` that `quantized` lacks, and the adapter's factors, to the
    nearest codes."""
    modules = quantized_modules(model)
    # A weight's name in the trunk, its scheme, module and attribute.
    jobs: list[tuple[str, WeightScheme, torch.nn.Module, str]] = [
        (weight_name(layer), scheme, modules[layer], "weight")
        for layer, scheme in schemes.items()
        if weight_name(layer) not in quantized.weights
    ]
    if adapter is not None and quantized.spec.adapter is not None:
        jobs += [
            (f"{ADAPTER_PREFIX}{part}.{i}", quantized.spec.adapter, getattr(adapter, part), str(i))
            for part in ("lora_A", "lora_B")
            for i in range(len(adapter.names))
        ]
    with one_thread():
        for done, (name, scheme, module, attribute) in enumerate(jobs):
            weight = getattr(module, attribute).detach().to(model.dtype)
            if fits(scheme, weight):
                codes = quantized.weights[name] = round_to(scheme, weight)
                parameter = torch.nn.Parameter(codes.dequantized(), requires_grad=False)
                setattr(module, attribute, parameter)
            step(done + 1, len(jobs))


def make_groups_alike(model: PreTrainedModel, quantized: QuantizedModel) -> None:
    """Give layers that read the same tensor one scheme, because a trunk may join their weights: if
    one has no codes, none has."""
    for group in input_groups(model):
        names = [weight_name(layer) for layer in group]
        parts = [quantized.weights.pop(name) for name in names if name in quantized.weights]
        if len(parts) == len(names):
            quantized.weights.update(zip(names, alike(parts), strict=True))


def alike(parts: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """Return the weights with one type of codes, and the same values: 8 bits, zero points and
    offsets for all, if one needs them."""
    types = {part.scheme.code_type for part in parts}
    made = [_in_int8(part) for part in parts] if types == {"int4", "int8"} else list(parts)
    if any(part.scheme.zero_points for part in made):
        made = [_with_zero_points(part) for part in made]
    if any(part.offsets is not None for part in made):
        made = [
            replace(part, offsets=torch.zeros_like(part.scales)) if part.offsets is None else part
            for part in made
        ]
    # Factors to shrink scales by say nothing about codes.
    return [replace(part, scheme=made[0].scheme) for part in made]


def _in_int8(part: QuantizedWeight) -> QuantizedWeight:
    if part.scheme.code_type == "int8":
        return part
    codes = part.codes().to(torch.int8).reshape(*part.scales.shape, -1)
    if part.zero_points is not None:
        codes = codes - part.zero_points[..., None].to(torch.int8)
    return QuantizedWeight(INT8, codes.flatten(1), part.scales, None, part.offsets)


def _with_zero_points(part: QuantizedWeight) -> QuantizedWeight:
    if part.scheme.zero_points:
        return part
    scheme = replace(part.scheme, zero_points=True)
    middle = (MAX_UNSIGNED_CODE[scheme.code_type] + 1) // 2
    zero_points = torch.full_like(part.scales, middle, dtype=torch.uint8)
    data = pack(scheme, part.codes().to(torch.int16) + middle)
    return QuantizedWeight(scheme, data, part.scales, zero_points, part.offsets)
