"""Rounds a model's weights in place, and keeps their codes for the trunk's graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, get_args

import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import Adapter, linear_layers
from pass_exporter.progress import Step
from pass_exporter.quantize.alike import alike
from pass_exporter.quantize.rounding import QuantizedWeight, fits, round_to
from pass_exporter.quantize.spec import QuantSpec, WeightScheme
from pass_exporter.threads import one_thread


@dataclass
class QuantizedModel:
    """The result of quantizing a model.

    weights: the codes, by weights' names in the trunk, such as `model.lm_head.weight`.
    calibration: OWN_TEXT or FILE_TEXT of quantize/run.py; None if no text was run.
    table: the codes of the embedding table, perhaps those of the LM head; None if it is floats.
    """

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
"""What the layers read that may read the same tensor as others of their module, by their names."""


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


FactorPart = Literal["lora_A", "lora_B"]


def factor_name(part: FactorPart, index: int) -> str:
    """Return the name in the trunk of a factor of the adapter's layer `index`."""
    return f"{ADAPTER_PREFIX}{part}.{index}"


def quantized_modules(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Return the decoder's linear layers and the LM head (LM_HEAD) by name."""
    return {**linear_layers(model), LM_HEAD: model.lm_head}


def input_groups(model: PreTrainedModel) -> list[tuple[str, ...]]:
    """Return the names of the decoder's linear layers, grouped by the tensor that they read."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in linear_layers(model):
        module, _, part = name.rpartition(".")
        groups.setdefault((module, READERS.get(part, part)), []).append(name)
    return [tuple(names) for names in groups.values()]


def shares_table(model: PreTrainedModel, spec: QuantSpec) -> bool:
    """Whether the embedding table gets the values of the LM head's codes, from which the trunk for
    CPUs reads embeddings. model: not yet quantized."""
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    return tied and model.dtype == torch.float32 and spec.keeps_codes


def layer_schemes(
    model: PreTrainedModel, spec: QuantSpec, fine_head: WeightScheme
) -> dict[str, WeightScheme]:
    """Return the scheme of every layer that is to be rounded by `spec`. fine_head: that of an LM
    head for which 4 bits are too few."""
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
    """Replace the weight of a layer. A weight that other modules share stays as it is in these."""
    module.weight = torch.nn.Parameter(values, requires_grad=False)


def round_weights(
    model: PreTrainedModel,
    adapter: Adapter | None,
    schemes: Mapping[str, WeightScheme],
    quantized: QuantizedModel,
    step: Step,
) -> None:
    """Round the layers of `schemes` that `quantized` lacks, and the adapter's factors, to the
    nearest codes, and add the codes. The weights are set to the values of their codes."""
    modules = quantized_modules(model)
    jobs: list[Job] = [
        (weight_name(layer), scheme, modules[layer], "weight")
        for layer, scheme in schemes.items()
        if weight_name(layer) not in quantized.weights
    ]
    jobs += _factors(adapter, quantized.spec)
    with one_thread():
        for done, (name, scheme, module, attribute) in enumerate(jobs):
            weight = getattr(module, attribute).detach().to(model.dtype)
            if fits(scheme, weight):
                codes = quantized.weights[name] = round_to(scheme, weight)
                parameter = torch.nn.Parameter(codes.dequantized(), requires_grad=False)
                setattr(module, attribute, parameter)
            step(done + 1, len(jobs))


Job = tuple[str, WeightScheme, torch.nn.Module, str]
"""A weight to round: its name in the trunk, its scheme, the module that has it, and the name of the
module's attribute."""


def _factors(adapter: Adapter | None, spec: QuantSpec) -> Iterator[Job]:
    if adapter is not None and spec.adapter is not None:
        for part, index in product(get_args(FactorPart), range(len(adapter.names))):
            yield factor_name(part, index), spec.adapter, getattr(adapter, part), str(index)


def make_groups_alike(model: PreTrainedModel, quantized: QuantizedModel) -> None:
    """Give the codes of layers that read the same tensor one scheme, because a trunk may join their
    weights. If one of the layers has no codes, none has."""
    for group in input_groups(model):
        names = [weight_name(layer) for layer in group]
        parts = [quantized.weights.pop(name) for name in names if name in quantized.weights]
        if len(parts) == len(names):
            quantized.weights.update(zip(names, alike(parts), strict=True))
