"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): divides channels of large activations by
factors, in the norm or layer that produces the channels, and multiplies the weights that read a
channel by its factor. The model's results stay the same, but the channels have similar magnitudes,
so that rounding activations to 8 bits loses less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import Adapter, linear_layers
from pass_exporter.quantize.points import LayerOutputs, QuantPoint

MIN_MAGNITUDE = 1e-5
"""Channels with smaller activations or weights hardly affect the output, and get the factor 1."""


def smooth(
    model: PreTrainedModel,
    adapter: Adapter | None,
    maxima: Mapping[QuantPoint, torch.Tensor],
    exponent: float,
) -> dict[QuantPoint, torch.Tensor]:
    """Smooth every point with a producer in place. Return the new maxima.

    maxima: by point, the largest magnitude of each channel [in]. A channel is divided by
    magnitude^exponent / weight^(1-exponent), where weight is the largest magnitude of the weights
    that multiply the channel, in all readers.
    """
    layers, adapters, new_maxima = linear_layers(model), _adapter_factors(adapter), dict(maxima)
    for point, magnitudes in maxima.items():
        producer = point.producer
        if producer is None:
            continue
        weights = torch.stack(
            [layers[name].weight.float().abs().amax(0) for name in point.readers]
        ).amax(0)
        if isinstance(producer, LayerOutputs):
            magnitudes, weights = _by_output(producer, magnitudes), _by_output(producer, weights)
        divisor = magnitudes.clamp(min=MIN_MAGNITUDE) ** exponent / weights.clamp(
            min=MIN_MAGNITUDE
        ) ** (1 - exponent)
        divisor = torch.where((magnitudes > MIN_MAGNITUDE) & (weights > MIN_MAGNITUDE), divisor, 1)
        if isinstance(producer, LayerOutputs):
            _divide_outputs(layers[producer.name], adapters.get(producer.name), producer, divisor)
            # Now by channel of the input, which has every output `repeats` times.
            divisor = divisor.view(-1, 1, producer.width).expand(-1, producer.repeats, -1).flatten()
        else:
            divisor = _divide_norm(producer, divisor)
        new_maxima[point] = maxima[point] / divisor
        for name in point.readers:
            _multiply(layers[name].weight, divisor)
            if name in adapters:
                _multiply(adapters[name][0], divisor)
    return new_maxima


def _adapter_factors(adapter: Adapter | None) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the adapter's A and B by layer."""
    if adapter is None:
        return {}
    return dict(zip(adapter.names, zip(adapter.lora_A, adapter.lora_B, strict=True), strict=True))


def _by_output(outputs: LayerOutputs, channels: torch.Tensor) -> torch.Tensor:
    """Return for each output [count] the largest value of its `channels` [in]."""
    return channels.view(-1, outputs.repeats, outputs.width).amax(1).flatten()


def _divide_norm(norm: Any, divisor: torch.Tensor) -> torch.Tensor:
    """Divide the norm's weight. Return the divisor that rounding to the weight's dtype leaves."""
    # Gemma multiplies by one plus the weight.
    offset = 1.0 if type(norm).__name__.startswith("Gemma") else 0.0
    before = norm.weight.float() + offset
    norm.weight.data = (before / divisor - offset).to(norm.weight.dtype)
    after = norm.weight.float() + offset
    exact: torch.Tensor = torch.where(after != 0, before / after, 1)
    return exact


def _divide_outputs(
    layer: torch.nn.Linear,
    adapter_factors: tuple[torch.Tensor, torch.Tensor] | None,
    outputs: LayerOutputs,
    divisor: torch.Tensor,
) -> None:
    """Divide `outputs` of the layer, and of its adapter, by divisor [count]."""
    part = slice(outputs.start, outputs.start + outputs.count)
    tensors = [layer.weight]
    if layer.bias is not None:
        tensors.append(layer.bias)
    if adapter_factors is not None:
        tensors.append(adapter_factors[1])  # B
    for tensor in tensors:
        by = divisor if tensor.ndim == 1 else divisor[:, None]
        tensor.data[part] = (tensor.data[part].float() / by).to(tensor.dtype)


def _multiply(weight: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply a weight [out,in] by factor [in], in place."""
    weight.data = (weight.data.float() * factor).to(weight.dtype)
