"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): divides channels of large activations by a
factor in the layer that produces them, and multiplies the weights that read them. The model's
results stay, and its channels have similar magnitudes, so 8-bit activations lose less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import Adapter, linear_layers
from pass_exporter.quantize.points import LayerOutputs, QuantPoint

MIN_MAGNITUDE = 1e-5
"""Channels with smaller activations or weights get no factor: they do not affect the output."""


def smooth(
    model: PreTrainedModel,
    adapter: Adapter | None,
    maxima: Mapping[QuantPoint, torch.Tensor],
    exponent: float,
) -> dict[QuantPoint, torch.Tensor]:
    """Move factors from activations to weights at every point with a producer. Return new maxima.

    maxima: the largest magnitude of each channel [in]. A channel's factor is magnitude^exponent /
    weight^(1-exponent); weight is the largest magnitude of its weights in all readers.
    """
    layers, factors, after = linear_layers(model), _factors(adapter), dict(maxima)
    for point, magnitude in maxima.items():
        producer = point.producer
        if producer is None:
            continue
        weights = torch.stack(
            [layers[name].weight.float().abs().amax(0) for name in point.readers]
        ).amax(0)
        if isinstance(producer, LayerOutputs):
            magnitude, weights = (_by_output(producer, values) for values in (magnitude, weights))
        divisor = magnitude.clamp(min=MIN_MAGNITUDE) ** exponent / weights.clamp(
            min=MIN_MAGNITUDE
        ) ** (1 - exponent)
        divisor = torch.where((magnitude > MIN_MAGNITUDE) & (weights > MIN_MAGNITUDE), divisor, 1)
        if isinstance(producer, LayerOutputs):
            _divide_outputs(layers[producer.name], factors.get(producer.name), producer, divisor)
            divisor = divisor.view(-1, 1, producer.width).expand(-1, producer.repeats, -1).flatten()
        else:
            divisor = _divide_norm(producer, divisor)
        after[point] = maxima[point] / divisor
        for name in point.readers:
            _scale(layers[name].weight, divisor)
            if name in factors:
                _scale(factors[name][0], divisor)
    return after


def _factors(adapter: Adapter | None) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the adapter's A and B by layer."""
    if adapter is None:
        return {}
    return dict(zip(adapter.names, zip(adapter.lora_A, adapter.lora_B, strict=True), strict=True))


def _by_output(outputs: LayerOutputs, channels: torch.Tensor) -> torch.Tensor:
    """[in] -> [count]: for each output, the largest value of the channels that it determines."""
    return channels.view(-1, outputs.repeats, outputs.width).amax(1).flatten()


def _divide_norm(norm: Any, divisor: torch.Tensor) -> torch.Tensor:
    """Divide the norm's weight. Return the divisor after rounding to the weight's dtype."""
    # Gemma stores an offset from one.
    offset = 1.0 if type(norm).__name__.startswith("Gemma") else 0.0
    before = norm.weight.float() + offset
    norm.weight.data = (before / divisor - offset).to(norm.weight.dtype)
    after = norm.weight.float() + offset
    took_effect: torch.Tensor = torch.where(after != 0, before / after, 1)
    return took_effect


def _divide_outputs(
    layer: torch.nn.Linear,
    factors: tuple[torch.Tensor, torch.Tensor] | None,
    outputs: LayerOutputs,
    divisor: torch.Tensor,
) -> None:
    part = slice(outputs.start, outputs.start + outputs.count)
    tensors = [
        layer.weight,
        *([] if layer.bias is None else [layer.bias]),
        *([] if factors is None else [factors[1]]),
    ]
    for tensor in tensors:
        by = divisor if tensor.ndim == 1 else divisor[:, None]
        tensor.data[part] = (tensor.data[part].float() / by).to(tensor.dtype)


def _scale(weight: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply a weight [out,in] by factor [in], in place."""
    weight.data = (weight.data.float() * factor).to(weight.dtype)
