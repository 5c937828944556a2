"""Rounds a model's weights in place, and keeps their codes for the trunk's graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, get_args

import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import Adapter, linear_layers
from pass_exporter.progress import Step
from pass_exporter.quantize.columns import ColumnSplit
from pass_exporter.quantize.points import find_points
from pass_exporter.quantize.rounding import QuantizedWeight, round_to
from pass_exporter.quantize.spec import QuantSpec, WeightScheme
from pass_exporter.threads import one_thread


@dataclass
class QuantizedModel:
    """The result of quantizing a model. The dicts' keys are weights' names in the trunk, such as
    `model.lm_head.weight`.

    weights: the weight's codes.
    activations: the static scale of the rows that are multiplied with the weight.
    columns: how these rows are split into columns before they are rounded. The codes of a weight
    with an entry here are those of the weight times `ColumnSplit.divisor`.
    calibration: OWN_TEXT or FILE_TEXT of quantize/run.py; None if no text was run.
    """

    spec: QuantSpec
    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    activations: dict[str, float] = field(default_factory=dict)
    columns: dict[str, ColumnSplit] = field(default_factory=dict)
    calibration: str | None = None

    @property
    def weight_only(self) -> tuple[str, ...]:
        """The decoder's quantized layers without a static scale; () if spec.activations is None."""
        if self.spec.activations is None:
            return ()
        without_scale = (
            name
            for name in self.weights
            if name.startswith(DECODER_PREFIX) and name not in self.activations
        )
        return tuple(
            name.removeprefix(DECODER_PREFIX).removesuffix(".weight") for name in without_scale
        )


DECODER_PREFIX, ADAPTER_PREFIX = "model.model.", "adapter."


def weight_name(layer: str) -> str:
    """Return the name in the trunk of the weight of a layer such as `layers.0.mlp.up_proj`."""
    return "model.lm_head.weight" if layer == "lm_head" else f"{DECODER_PREFIX}{layer}.weight"


def layer_name(weight: str) -> str | None:
    """Return the layer whose `weight_name` is `weight`; None if there is none."""
    if weight == weight_name("lm_head"):
        return "lm_head"
    return (
        weight.removeprefix(DECODER_PREFIX).removesuffix(".weight")
        if weight.startswith(DECODER_PREFIX)
        else None
    )


FactorPart = Literal["lora_A", "lora_B"]


def factor_name(part: FactorPart, index: int) -> str:
    """Return the name in the trunk of a factor of the adapter's layer `index`."""
    return f"{ADAPTER_PREFIX}{part}.{index}"


def quantize_model(
    model: PreTrainedModel, adapter: Adapter | None, quantized: QuantizedModel, step: Step
) -> None:
    """Round the adapter's factors and the linear layers that `quantized` lacks, and add the codes.

    The weights are set to the values of their codes. If the LM head's weight is the embedding table
    too, the LM head gets a new weight, so that embeddings stay exact.
    """
    jobs = [*_layers(model, quantized), *_factors(adapter, quantized)]
    jobs = [job for job in jobs if job[0] not in quantized.weights]
    with one_thread():
        for done, (name, scheme, module, attribute) in enumerate(jobs):
            weight = getattr(module, attribute)
            if scheme.fits(weight.shape[1]):
                dequantized = _rounded(name, scheme, weight.detach().to(model.dtype), quantized)
                setattr(module, attribute, torch.nn.Parameter(dequantized, requires_grad=False))
            step(done + 1, len(jobs))


def _rounded(
    name: str, scheme: WeightScheme, weight: torch.Tensor, quantized: QuantizedModel
) -> torch.Tensor:
    """Add the codes of a weight to `quantized`, and return the values that they represent."""
    columns = quantized.columns.get(name)
    divisor = None if columns is None else columns.divisor.to(weight.dtype)
    codes = quantized.weights[name] = round_to(
        scheme, weight if divisor is None else weight * divisor
    )
    return codes.dequantized() if divisor is None else codes.dequantized() / divisor


Job = tuple[str, WeightScheme, torch.nn.Module, str]
"""A weight to round: its name in the trunk, its scheme, the module that has it, and the name of the
module's attribute."""


def _layers(model: PreTrainedModel, quantized: QuantizedModel) -> Iterator[Job]:
    spec = quantized.spec
    if spec.scheme is not None:
        points = find_points(model) if spec.attention_in is not None else []
        attention_in = {
            layer for point in points if point.kind == "attention_in" for layer in point.readers
        }
        for layer, module in linear_layers(model).items():
            name, scheme = weight_name(layer), spec.scheme
            if spec.attention_in is not None and layer in attention_in:
                scheme = spec.attention_in
            elif spec.activations is not None and name not in quantized.activations:
                scheme = spec.activations.left_out_weights
            yield name, scheme, module, "weight"
    if spec.lm_head is not None:
        yield weight_name("lm_head"), spec.lm_head, model.lm_head, "weight"


def _factors(adapter: Adapter | None, quantized: QuantizedModel) -> Iterator[Job]:
    spec = quantized.spec
    if adapter is not None and spec.adapter is not None:
        for part, index in product(get_args(FactorPart), range(len(adapter.names))):
            name, scheme = factor_name(part, index), spec.adapter
            if name in quantized.activations and spec.scheme is not None:
                scheme = spec.scheme
            yield name, scheme, getattr(adapter, part), str(index)
